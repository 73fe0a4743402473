"""What `outputs=` expects of an output: placements, or code that takes the full output to each rank's. The data needs no
torch; reading what the user wrote does."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graphguard.errors import CaptureError, GraphGuardError, ProgramError, UsageError
from graphguard.ir import Graph, Mesh, Value

if TYPE_CHECKING:
    from graphguard.capture.session import Captured

FULL, LOCAL = "full", "local"  # the input and the output of an expectation's graphs
_REDUCTIONS = ("sum", "avg", "max", "min")


@dataclass(frozen=True)
class Need:
    """Of some ranks, at least one must return the output: else something is nowhere. `what` says it, after the path."""

    ranks: tuple[int, ...]
    what: str


@dataclass(frozen=True)
class Expectation:
    """Placements or graphs, never both; with neither, any clean relation will do.

    placements: one per mesh axis, in mesh order: "Replicate", "Shard(1)", "Partial(sum)"; dims count from the front.
    graphs: one per rank, from the input "full" (the sequential output) to the output "local" (what the rank should return);
        None for a rank that does not return the output.
    text: for messages.
    needs: who must return it. wrong: why it cannot be right, whatever its values are.
    assumed: what was not checked of the code.
    """

    text: str
    placements: tuple[str, ...] | None = None
    graphs: tuple[Graph | None, ...] | None = None
    needs: tuple[Need, ...] = ()
    wrong: str | None = None
    assumed: str | None = None

    @property
    def states_relation(self) -> bool:
        return self.placements is not None or self.graphs is not None

    def unmet(self, path: str, ranks: Sequence[Graph]) -> list[Need]:
        """What is nowhere, as the ranks return the output."""
        return _unmet(self.needs, path, ranks)


def _unmet(needs: Sequence[Need], path: str, ranks: Sequence[Graph]) -> list[Need]:
    return [need for need in needs if all(ranks[rank].outputs.get(path) is None for rank in need.ranks)]


def expectations(
    outputs: Mapping[str, Any],
    captured: Captured,
    mesh: Mesh,
    needs: Mapping[str, Sequence[Need]] | None = None,
    wrong: Mapping[str, str] | None = None,
    of_parameters: Container[str] = (),
) -> dict[str, Expectation]:
    """What the user wrote as `outputs=`, checked against the outputs that there are, and what is known of outputs beside it.

    of_parameters: paths whose relation is that of a parameter, so that an error speaks of `params=`."""
    known = {path: value for path, value in captured.sequential.outputs.items() if value is not None}
    for path in outputs:
        if path not in known:
            raise UsageError(f"outputs= names {path!r}, which the sequential program does not return; it returns {list(known)}")
    # Where a part is nowhere, nothing else need be said.
    stated = {path: each for path, each in outputs.items() if not _unmet((needs or {}).get(path, ()), path, captured.ranks)}
    for path in stated:
        _require_grid(path, captured, mesh)
    functions = {path: expected for path, expected in stated.items() if _is_function(expected)}
    named = {path: "params=" if path in of_parameters else "outputs=" for path in functions}
    found = {path: _placed(path, each, known[path], mesh) for path, each in stated.items() if path not in functions}
    found |= _layouts(functions, named, known, captured, mesh)
    for path, more in (needs or {}).items():
        have = found.get(path, Expectation("any clean relation"))
        found[path] = replace(have, needs=(*more, *have.needs))
    for path, why in (wrong or {}).items():
        found[path] = replace(found.get(path, Expectation("any clean relation")), wrong=why)
    return {path: found[path] for path in dict.fromkeys([*outputs, *known]) if path in found}


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
def _layouts(
    functions: Mapping[str, Callable[..., Any]],
    named: Mapping[str, str],
    values: Mapping[str, Value],
    captured: Captured,
    mesh: Mesh,
) -> dict[str, Expectation]:
    """What code says of outputs. It must do no more than move elements, and leave none out; where it is other ranks than those
    that return the output to which it gives the rest, that is a fault of theirs."""
    returned = {path: [graph.outputs.get(path) is not None for graph in captured.ranks] for path in functions}
    found = _traced(functions, named, values, returned, mesh) if functions else {}
    for path, function in functions.items():
        expectation, left_out = _counted(path, named[path], values[path], found[path])
        if left_out is not None and not all(returned[path]):
            everyone = {path: [True] * mesh.size}
            with suppress(GraphGuardError):  # of a rank that returns nothing, code need not know what it should
                whole = _traced({path: function}, named, values, everyone, mesh)[path]
                expectation, left_out = _counted(path, named[path], values[path], whole)
        if left_out is not None:
            raise UsageError(f"{named[path]}: {path!r}: by {expectation.text}, no rank has {left_out}")
        found[path] = expectation
    return found


def _counted(path: str, who: str, value: Value, expectation: Expectation) -> tuple[Expectation, str | None]:
    """With who must return what; and which elements no rank has."""
    from graphguard.coverage import MOST_ELEMENTS, NotClean, holders, in_words, sources_of

    assert expectation.graphs is not None
    graphs = expectation.graphs
    if value.numel * sum(graph is not None for graph in graphs) > MOST_ELEMENTS:
        assumed = f"{path}: {expectation.text} only moves elements, and leaves out none: there are too many to look at"
        return replace(expectation, assumed=assumed), None
    sources = []
    for rank, graph in enumerate(graphs):
        try:
            sources.append(None if graph is None else sources_of(graph, FULL, LOCAL))
        except NotClean as error:
            raise UsageError(
                f"{who}: {path!r}: {expectation.text} is not clean: for rank {rank} it gives at {list(error.index)} what is no "
                "element of the output; it may slice, join, transpose, reshape and pad"
            ) from None
    needs, left_out = [], None
    for ranks, places in holders(sources, value.numel):
        text = in_words(places, value.shape)
        if not ranks:
            left_out = text
        else:
            who_alone = f"{_in_words(ranks)} alone, and {_lacks(ranks)}"
            needs.append(Need(ranks, f"by {expectation.text}, {text} should be on {who_alone}"))
    return replace(expectation, needs=tuple(needs)), left_out


def _in_words(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _lacks(ranks: Sequence[int]) -> str:
    return "it returns nothing" if len(ranks) == 1 else "they return nothing"


def _traced(
    functions: Mapping[str, Callable[..., Any]],
    named: Mapping[str, str],
    values: Mapping[str, Value],
    returned: Mapping[str, list[bool]],
    mesh: Mesh,
) -> dict[str, Expectation]:
    """Trace the functions as input relations are: each sequential output is the input of a program that does nothing."""
    from graphguard.aten.operators import DTYPES
    from graphguard.capture.program import FunctionProgram
    from graphguard.capture.session import Subject, capture
    from graphguard.relation import Input

    inputs = {}
    for path, function in functions.items():
        local = _local(path, named[path], function, returned[path], mesh)
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
                _alone(relation, path) if there else None for relation, there in zip(relations, returned[path], strict=True)
            ),
        )
        for path, function in functions.items()
    }


def _local(path: str, who: str, function: Callable[..., Any], returned: list[bool], mesh: Mesh) -> Callable[..., Any]:
    """The function as an input relation has it, called for ranks that return the output only."""
    from torch import Tensor

    ranks = {tuple(mesh.coordinate(rank).items()): rank for rank in range(mesh.size)}

    def local(full: Any, coord: dict[str, int]) -> Any:
        if not returned[ranks[tuple(coord.items())]]:
            return full
        result = function(full, coord)
        if not isinstance(result, Tensor):
            raise UsageError(f"{who}: the function of {path!r} returned {type(result).__name__}, not a tensor")
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
