"""What `outputs=` expects of an output: placements, or code that takes the full output to each rank's. The data needs no
torch; reading what the user wrote does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphguard.errors import CaptureError, GraphGuardError, ProgramError, UsageError
from graphguard.ir import Graph, Mesh, Value

if TYPE_CHECKING:
    from graphguard.capture.session import Captured

FULL, LOCAL = "full", "local"  # the input and the output of an expectation's graphs
_REDUCTIONS = ("sum", "avg", "max", "min")


@dataclass(frozen=True)
class Expectation:
    """Placements or graphs, never both.

    placements: one per mesh axis, in mesh order: "Replicate", "Shard(1)", "Partial(sum)"; dims count from the front.
    graphs: one per rank, from the input "full" (the sequential output) to the output "local" (what the rank should return);
        None for a rank that does not return the output.
    text: for messages.
    """

    text: str
    placements: tuple[str, ...] | None = None
    graphs: tuple[Graph | None, ...] | None = None


def expectations(outputs: Mapping[str, Any], captured: Captured, mesh: Mesh) -> dict[str, Expectation]:
    """What the user wrote as `outputs=`, checked against the outputs that there are."""
    known = {path: value for path, value in captured.sequential.outputs.items() if value is not None}
    for path in outputs:
        if path not in known:
            raise UsageError(f"outputs= names {path!r}, which the sequential program does not return; it returns {list(known)}")
        _require_grid(path, captured, mesh)
    functions = {path: expected for path, expected in outputs.items() if _is_function(expected)}
    traced = _traced(functions, known, captured, mesh) if functions else {}
    return {
        path: traced[path] if path in traced else _placed(path, expected, known[path], mesh)
        for path, expected in outputs.items()
    }


def _require_grid(path: str, captured: Captured, mesh: Mesh) -> None:
    """Where some ranks do not return an output, what is expected speaks of those that do."""
    ranks = [rank for rank, graph in enumerate(captured.ranks) if graph.outputs.get(path) is not None]
    if mesh.sub_grid(ranks) is None:
        raise UsageError(
            f"outputs= names {path!r}, which only the ranks {', '.join(map(str, ranks))} return; they form no sub-grid of "
            f"the mesh {mesh}, so no relation can be stated of it: leave it out, or return it on a sub-grid"
        )


def _is_function(expected: Any) -> bool:
    from torch.distributed.tensor.placement_types import Placement

    return callable(expected) and not isinstance(expected, (Placement, type))


# ---------------------------------------------------------------------- placements
def _placed(path: str, expected: Any, value: Value, mesh: Mesh) -> Expectation:
    from graphguard.relation import placements_by_axis

    try:
        by_axis = placements_by_axis(path, expected, mesh)
    except UsageError as error:  # its words are those of inputs
        raise UsageError("outputs=: " + str(error).replace("input ", "output ", 1)) from None
    placements = {axis: _name(path, placement, value) for axis, placement in by_axis.items()}
    stated = ", ".join(f"{axis}: {placement}" for axis, placement in placements.items())
    return Expectation(f"{{{stated}}}" if len(placements) > 1 else placements[mesh.names[0]], tuple(placements.values()))


def _name(path: str, placement: Any, value: Value) -> str:
    from torch.distributed.tensor.placement_types import Partial, Shard

    if isinstance(placement, Shard):
        rank = len(value.shape)
        if not -rank <= placement.dim < rank:
            raise UsageError(
                f"outputs=: output {path!r}: Shard({placement.dim}) names a dim that its shape {value.shape} does not have"
            )
        return f"Shard({placement.dim % rank})"
    if isinstance(placement, Partial):
        if placement.reduce_op not in _REDUCTIONS:
            raise UsageError(f"outputs=: output {path!r}: Partial({placement.reduce_op!r}) is none of {', '.join(_REDUCTIONS)}")
        return f"Partial({placement.reduce_op})"
    return "Replicate"


# ---------------------------------------------------------------------- code
def _traced(
    functions: Mapping[str, Callable[..., Any]], values: Mapping[str, Value], captured: Captured, mesh: Mesh
) -> dict[str, Expectation]:
    """Trace the functions as input relations are: each sequential output is the input of a program that does nothing."""
    from graphguard.aten.operators import DTYPES
    from graphguard.capture.program import FunctionProgram
    from graphguard.capture.session import Subject, capture
    from graphguard.relation import Input

    inputs = {}
    for path, function in functions.items():
        local = _local(path, function, [graph.outputs.get(path) is not None for graph in captured.ranks], mesh)
        inputs[path] = Input(values[path].shape, dtype=DTYPES[values[path].dtype], local=local)
    nothing = FunctionProgram(lambda **full: None, "sequential")
    try:
        relations = capture(Subject(nothing, nothing, mesh, inputs)).relations
    except (CaptureError, ProgramError) as error:
        raise _of_outputs(error) from None
    return {
        path: Expectation(
            f"the layout of {getattr(function, '__name__', type(function).__name__)}",
            graphs=tuple(
                _alone(relation, path) if rank.outputs.get(path) is not None else None
                for relation, rank in zip(relations, captured.ranks, strict=True)
            ),
        )
        for path, function in functions.items()
    }


def _local(path: str, function: Callable[..., Any], returned: list[bool], mesh: Mesh) -> Callable[..., Any]:
    """The function as an input relation has it, called for ranks that return the output only."""
    from torch import Tensor

    ranks = {tuple(mesh.coordinate(rank).items()): rank for rank in range(mesh.size)}

    def local(full: Any, coord: dict[str, int]) -> Any:
        if not returned[ranks[tuple(coord.items())]]:
            return full
        result = function(full, coord)
        if not isinstance(result, Tensor):
            raise UsageError(f"outputs=: the function of {path!r} returned {type(result).__name__}, not a tensor")
        return result

    return local


def _alone(relation: Graph, path: str) -> Graph:
    """What the relation says of one output."""
    from graphguard.prune import prune

    graph = Graph(
        f"expected {path} of rank {relation.rank}",
        {FULL: relation.inputs[path]},
        {LOCAL: relation.outputs[path]},
        relation.nodes,
        relation.constants,
        mesh=relation.mesh,
        rank=relation.rank,
    )
    prune(graph)
    return graph


def _of_outputs(error: GraphGuardError) -> GraphGuardError:
    """The error of a traced function, which speaks of inputs, in the words of outputs."""
    text = str(error).replace("the input relation of", "outputs= for")
    return ProgramError(text, error.frames) if isinstance(error, ProgramError) else CaptureError(text)
