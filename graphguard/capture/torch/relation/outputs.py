"""`outputs=`: what is expected of outputs, stated by placements or by plain torch code, as the prover takes it."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import placement_types

from graphguard.aten.operators import DTYPES
from graphguard.capture.front import Captured
from graphguard.capture.torch.program import FunctionProgram
from graphguard.capture.torch.relation.inputs import Input, placements_by_axis
from graphguard.capture.torch.session import capture
from graphguard.capture.torch.subject import Subject
from graphguard.errors import CaptureError, GraphGuardError, ProgramError, UsageError
from graphguard.graph.ir import Graph, Mesh, Value
from graphguard.graph.placement import REDUCTIONS, Partial, Placement, Shard
from graphguard.graph.prune import prune
from graphguard.oracle.coverage import MOST_ELEMENTS, NotClean, holders, in_words, sources_of
from graphguard.relation.expectation import FULL, LOCAL, Expectation, Need, unmet


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
    stated = {path: each for path, each in outputs.items() if not unmet((needs or {}).get(path, ()), captured.returning(path))}
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
    ranks = [rank for rank, there in enumerate(captured.returning(path)) if there]
    if mesh.sub_grid(ranks) is None:
        raise UsageError(
            f"outputs= names {path!r}, which only the ranks {', '.join(map(str, ranks))} return; they form no sub-grid of "
            f"the mesh {mesh}, so no relation can be stated of it: leave it out, or return it on a sub-grid"
        )


def _is_function(expected: Any) -> bool:
    return callable(expected) and not isinstance(expected, (placement_types.Placement, type))


# ---------------------------------------------------------------------- placements
def _placed(path: str, expected: Any, value: Value, mesh: Mesh) -> Expectation:
    try:
        by_axis = placements_by_axis(path, expected, mesh)
    except UsageError as error:  # its words are those of inputs
        raise UsageError("outputs=: " + str(error).replace("input ", "output ", 1)) from None
    placements = {axis: _fitting(path, placement, value) for axis, placement in by_axis.items()}
    stated = ", ".join(f"{axis}: {placement}" for axis, placement in placements.items())
    text = f"{{{stated}}}" if len(placements) > 1 else str(placements[mesh.names[0]])
    return Expectation(text, tuple(placements.values()))


def _fitting(path: str, placement: Placement, value: Value) -> Placement:
    if isinstance(placement, Shard):
        rank = len(value.shape)
        if not -rank <= placement.dim < rank:
            raise UsageError(
                f"outputs=: output {path!r}: Shard({placement.dim}) names a dim that its shape {value.shape} does not have"
            )
        return Shard(placement.dim % rank)
    if isinstance(placement, Partial) and placement.reduce not in REDUCTIONS:
        raise UsageError(f"outputs=: output {path!r}: Partial({placement.reduce!r}) is none of {', '.join(REDUCTIONS)}")
    return placement


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
    returned = {path: captured.returning(path) for path in functions}
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
    ranks = {tuple(mesh.coordinate(rank).items()): rank for rank in range(mesh.size)}

    def local(full: Any, coord: dict[str, int]) -> Any:
        if not returned[ranks[tuple(coord.items())]]:
            return full
        result = function(full, coord)
        if not isinstance(result, torch.Tensor):
            raise UsageError(f"{who}: the function of {path!r} returned {type(result).__name__}, not a tensor")
        return result

    return local


def _alone(relation: Graph, path: str) -> Graph:
    """What the relation says of one output."""
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
