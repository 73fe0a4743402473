"""`params=`: how each rank's parameters come from those of the sequential module, which are inputs named `params.<name>`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from graphguard.aten.operators import DTYPES
from graphguard.capture.front import Captured
from graphguard.capture.torch.program import PARAMETERS, FunctionProgram
from graphguard.capture.torch.relation.inputs import Coordinate, Input, localise, placement_of
from graphguard.capture.torch.relation.layouts import by_rank, has_sums, part_of, placements_on, text_of, unknown
from graphguard.capture.torch.relation.made_parameters import (
    GRADIENTS,
    Fused,
    MadeParameter,
    made_parameter,
    require_all_read,
)
from graphguard.capture.torch.session import capture as capture_subject
from graphguard.capture.torch.subject import Subject
from graphguard.errors import UsageError
from graphguard.graph.ir import MARKED, Graph, Layout, Mesh
from graphguard.graph.paths import folded
from graphguard.graph.placement import REPLICATE, Partial, Placement, Shard
from graphguard.graph.prune import prune
from graphguard.relation.expectation import Need

BY_DTENSOR, BY_MARK = "by its DTensor placements", "by its tensor_model_parallel mark"


@dataclass(frozen=True)
class Parameter:
    """How the ranks' parts of a sequential parameter come from it, and how that was found.

    source: the sequential parameter's input; differs from the ranks' name for it only where a tied one is untied on them.
    guessed: whether shapes alone speak for it.
    """

    source: str
    input: Input
    relation: str
    found: str
    guessed: bool = False

    def __str__(self) -> str:
        return f"{self.relation}, {self.found}"


Parameters = Mapping[str, Parameter | MadeParameter]  # by the name of their input on the ranks


def use_sequential_names(captured: Captured) -> None:
    """A rank that has a tied parameter under its other name only (the last stage of a pipeline) has it under the first."""
    for graph in (each.graph for each in captured.held):
        for name, first in captured.sequential.ties.items():
            if name in graph.inputs and first not in graph.inputs:
                _rename(graph.inputs, name, first)
                _rename(graph.input_layouts, name, first)
                path, wanted = (GRADIENTS + each.removeprefix(PARAMETERS) for each in (name, first))
                if wanted not in graph.outputs:
                    _rename(graph.outputs, path, wanted)
                    _rename(graph.layouts, path, wanted)


def _rename(named: dict[str, Any], old: str, new: str) -> None:
    if old in named:
        items = [(new if name == old else name, item) for name, item in named.items()]
        named.clear()
        named.update(items)


def found_parameters(subject: Subject, captured: Captured, params: Any) -> Parameters:
    """The relation of every parameter, by the name of its input on the ranks."""
    if params != "auto" and not isinstance(params, Mapping):
        raise UsageError(f"params= is {params!r}; write 'auto', or {{pattern: placement}}")
    sources = {name: name for name in captured.sequential.inputs if name not in subject.inputs}
    ties = captured.sequential.ties
    sources |= {name: ties[name] for each in captured.held for name in each.graph.inputs if name in ties}
    stated: Mapping[str, Any] = {} if params == "auto" else params
    made = made_parameters(captured, subject.mesh, stated, sources)
    for pattern in stated:
        if not any(fnmatchcase(name.removeprefix(PARAMETERS), pattern) for name in [*sources, *made]):
            raise UsageError(f"params= names {pattern!r}, which no parameter of the sequential module matches")
    _require_counterparts(captured, [*sources, *made])
    found = {name: _found(name, source, captured, subject.mesh, stated) for name, source in sources.items()}
    return {**found, **made}


def made_parameters(
    captured: Captured, mesh: Mesh, stated: Mapping[str, Any], sources: Mapping[str, str]
) -> dict[str, MadeParameter]:
    """Those of the ranks that the sequential module has not, by the functions of all parameters that are stated of them."""
    shapes = {source.removeprefix(PARAMETERS): captured.sequential.inputs[source].shape for source in sources.values()}
    there = {name for each in captured.held for name in each.graph.inputs}
    made = {}
    for name in sorted(name for name in there if name.startswith(PARAMETERS) and name not in sources):
        short = name.removeprefix(PARAMETERS)
        make = next((each for pattern, each in stated.items() if fnmatchcase(short, pattern)), None)
        if callable(make) and not isinstance(make, Fused):
            made[name] = made_parameter(short, make, shapes, mesh)
    by_name = {name.removeprefix(PARAMETERS): each for name, each in made.items()}
    require_all_read(by_name, {name.removeprefix(PARAMETERS): None for name in there if name in sources})
    return made


def with_relations(subject: Subject, captured: Captured, parameters: Parameters) -> Captured:
    """With the input relations of all ranks, those of the parameters among them."""
    nothing = FunctionProgram(lambda **full: None, "sequential")
    known = {name: found for name, found in parameters.items() if isinstance(found, Parameter)}
    inputs = {**subject.inputs, **{found.source: found.input for name, found in known.items() if name == found.source}}
    local_inputs = None
    apart = any(name != found.source for name, found in known.items()) or len(known) < len(parameters)
    if subject.local_inputs is not None or apart:
        inputs = {name: Input(spec.shape, dtype=spec.dtype) for name, spec in inputs.items()}
        local_inputs = _beside(subject, parameters)
    related = capture_subject(Subject(nothing, nothing, subject.mesh, inputs, local_inputs))
    captured = captured.with_relations(related)
    for each in captured.held:
        relation, graph = each.relation, each.graph
        relation.outputs = {name: relation.outputs[name] for name in graph.inputs}
        prune(relation)
        _require_shapes(each.members[0], relation, graph)
    return captured


def expected_gradients(captured: Captured, parameters: Parameters) -> dict[str, Any]:
    """Each gradient has its parameter's own relation. One that is a DTensor stands for its full tensor, so is left out."""
    by_path: dict[str, Any] = {}
    for name, found in parameters.items():
        relation = found.of_row() if isinstance(found, MadeParameter) else found.input.local or found.input.placement
        by_path[GRADIENTS + name.removeprefix(PARAMETERS)] = relation
    return {
        path: relation
        for path, relation in by_path.items()
        if captured.sequential.outputs.get(path) is not None and not any(path in each.graph.layouts for each in captured.held)
    }


def with_gradients_of_made(captured: Captured, parameters: Parameters) -> None:
    """The sequential gradients that were read by maps are returned as the maps' parameters, not by themselves."""
    outputs, read = captured.sequential.outputs, set[str]()
    for name, found in parameters.items():
        path = GRADIENTS + name.removeprefix(PARAMETERS)
        if isinstance(found, MadeParameter) and found.add_gradient(captured.sequential, path):
            read.update(GRADIENTS + each for each in found.reads)
    for path in read:
        if not any(captured.returning(path)):
            del outputs[path]


def needed_gradients(captured: Captured, parameters: Parameters) -> dict[str, list[Need]]:
    """Every rank that holds a parameter has its gradient, if the sequential program has one."""
    needs: dict[str, list[Need]] = {}
    for name in parameters:
        path = GRADIENTS + name.removeprefix(PARAMETERS)
        if captured.sequential.outputs.get(path) is not None:
            holding = tuple(rank for each in captured.held if name in each.graph.inputs for rank in each.members)
            needs[path] = [Need(holding, "rank {rank} holds the parameter, and has no gradient of it", every=True)]
    return needs


def guesses(parameters: Parameters) -> list[str]:
    """What is assumed of parameters whose shapes alone speak."""
    by_relation: dict[str, list[str]] = {}
    for name, found in parameters.items():
        if isinstance(found, Parameter) and found.guessed:
            by_relation.setdefault(found.relation, []).append(name.removeprefix(PARAMETERS))
    return [
        f"{relation}, as their shapes suggest: the parameters {', '.join(folded(names))}"
        for relation, names in by_relation.items()
    ]


# ---------------------------------------------------------------------- how a relation is found
def _found(name: str, source: str, captured: Captured, mesh: Mesh, stated: Mapping[str, Any]) -> Parameter:
    value = captured.sequential.inputs[source]
    dtype = DTYPES[value.dtype]
    for pattern, relation in stated.items():
        if fnmatchcase(name.removeprefix(PARAMETERS), pattern):
            if isinstance(relation, Fused):
                relation = relation.on(mesh)
            if callable(relation):
                text = getattr(relation, "__name__", type(relation).__name__)
                return Parameter(source, Input(value.shape, dtype=dtype, local=relation), text, "as params= states")
            return Parameter(source, Input(value.shape, relation, dtype), _text(relation, mesh), "as params= states")
    shapes = {
        rank: each.graph.inputs[name].shape for each in captured.held if name in each.graph.inputs for rank in each.members
    }
    layouts = by_rank(captured, lambda graph: graph.input_layouts.get(name))
    if any(layouts):
        return _by_layout(name, source, Input(value.shape, dtype=dtype), layouts, shapes, mesh)
    placement, how = _by_shape(name, value.shape, shapes, mesh)
    relation = Input(value.shape, placement, dtype)
    return Parameter(source, relation, _text(placement, mesh), how, guessed=placement != REPLICATE)


def _by_layout(
    name: str, source: str, whole: Input, layouts: list[Layout | None], shapes: Mapping[int, tuple[int, ...]], mesh: Mesh
) -> Parameter:
    first = next(layout for layout in layouts if layout is not None)
    found = BY_DTENSOR
    other = next((each.shape for each in layouts if each is not None and each.by != MARKED and each.shape != whole.shape), None)
    if other is not None:
        raise unknown(
            name, f"it is a DTensor that stands for a tensor of shape {other}, and the sequential one has {whole.shape}"
        )
    if first.by == MARKED:
        found = BY_MARK
        if not first.mesh_ranks:
            layouts = [_on_its_axis(name, layout, whole.shape, shapes[rank], rank, mesh) if layout else None
                       for rank, layout in enumerate(layouts)]  # fmt: skip
    if not any(layouts):
        return Parameter(source, whole, str(REPLICATE), found)
    if has_sums(layouts):
        raise unknown(name, f"it is placed by {text_of(first)}")
    placements = placements_on(mesh, [layout if rank in shapes else first for rank, layout in enumerate(layouts)])
    if placements is None:
        relation = Input(whole.shape, dtype=whole.dtype, local=part_of(name, layouts, mesh))
        return Parameter(source, relation, text_of(first), found)
    return Parameter(source, Input(whole.shape, placements, whole.dtype), _text(placements, mesh), found)


def _on_its_axis(
    name: str, layout: Layout, full: tuple[int, ...], local: tuple[int, ...], rank: int, mesh: Mesh
) -> Layout | None:
    """A mark says the dim; the axis is the one by which the dim is smaller."""
    if full == local:
        return None
    candidates = _candidates(full, local, mesh)
    if len(candidates) != 1:
        raise _ambiguous(name, full, local, rank, candidates)
    (axis, _), here = candidates[0], mesh.coordinate(rank)
    group = [r for r in range(mesh.size) if {**mesh.coordinate(r), axis: 0} == {**here, axis: 0}]
    return layout._replace(mesh_shape=(len(group),), mesh_ranks=tuple(group))


def _by_shape(
    name: str, full: tuple[int, ...], shapes: Mapping[int, tuple[int, ...]], mesh: Mesh
) -> tuple[Placement | dict[str, Placement], str]:
    if all(shape == full for shape in shapes.values()):
        return REPLICATE, "as its shape is the sequential one's" if shapes else "and no rank has it"
    rank, local = next((rank, shape) for rank, shape in shapes.items() if shape != full)
    candidates = _candidates(full, local, mesh) if set(shapes.values()) == {local} else []
    if len(candidates) != 1:
        raise _ambiguous(name, full, local, rank, candidates)
    axis, dim = candidates[0]
    return {axis: Shard(dim)}, f"as its shape {local} is a part of {full}"


def _candidates(full: tuple[int, ...], local: tuple[int, ...], mesh: Mesh) -> list[tuple[str, int]]:
    """The axes, each with a dim, by which one shape may be a shard of the other."""
    if len(full) != len(local):
        return []
    smaller = [dim for dim in range(len(full)) if full[dim] != local[dim]]
    if len(smaller) != 1:
        return []
    dim = smaller[0]
    return [(axis, dim) for axis, size in mesh.axes if local[dim] * size == full[dim]]


def _ambiguous(
    name: str, full: tuple[int, ...], local: tuple[int, ...], rank: int, candidates: list[tuple[str, int]]
) -> UsageError:
    if not candidates:
        return unknown(name, f"it has shape {full}, and {local} on rank {rank}; state it in params=")
    may = " or ".join(f"{Shard(dim)} on {axis}" for axis, dim in candidates)
    return unknown(name, f"with shape {local} of {full} it may be {may}; state it in params=")


def _text(placement: Any, mesh: Mesh) -> str:
    """`Shard(0) on tp`, as short as it can be said."""
    by_axis = dict(placement) if isinstance(placement, Mapping) else None
    if isinstance(placement, (tuple, list)):
        by_axis = dict(zip(mesh.names, placement, strict=False))
    elif by_axis is None:
        by_axis = dict.fromkeys(mesh.names, placement)
    named = [f"{_short(item)} on {axis}" for axis, item in by_axis.items() if placement_of(item) != REPLICATE]
    return " and ".join(named) or str(REPLICATE)


def _short(item: Any) -> str:
    placement = placement_of(item)
    if isinstance(placement, Partial):
        return "Partial"
    return repr(item) if placement is None else str(placement)


# ---------------------------------------------------------------------- tracing
def _beside(subject: Subject, parameters: Parameters) -> Callable[..., Any]:
    """The user's `local_inputs`, if any, and the parameters beside what it returns."""

    def refuse(tensor: torch.Tensor, key: str, index: int, count: int) -> torch.Tensor:
        raise UsageError(
            "a Partial parameter beside local_inputs=, or a Partial input beside tied parameters, is not supported"
        )

    def local_inputs(full: dict[str, torch.Tensor], coord: Coordinate) -> dict[str, Any]:
        if subject.local_inputs is not None:
            mine = dict(subject.local_inputs({name: full[name] for name in subject.inputs}, dict(coord)))
        else:
            mine = {
                name: localise(name, full[name], spec, subject.mesh, coord, refuse) for name, spec in subject.inputs.items()
            }
        every = {name.removeprefix(PARAMETERS): full[name] for name in full if name not in subject.inputs}
        for name, found in parameters.items():
            if isinstance(found, MadeParameter):
                mine[name] = found.local(name.removeprefix(PARAMETERS), every, coord)
            else:
                mine[name] = localise(name, full[found.source], found.input, subject.mesh, coord, refuse)
        return mine

    return local_inputs


def _require_counterparts(captured: Captured, known: Sequence[str]) -> None:
    for each in captured.held:
        for name in each.graph.inputs:
            if name not in known and name not in each.relation.outputs:
                raise unknown(
                    name,
                    f"rank {each.members[0]} has it, and the sequential module has no parameter of that name; "
                    "params={name: fn(all_params, coord)} says what it is made of",
                )


def _require_shapes(rank: int, relation: Graph, graph: Graph) -> None:
    for name, value in relation.outputs.items():
        have = graph.inputs[name]
        if value is not None and name.startswith(PARAMETERS) and value.type != have.type:
            raise unknown(name, f"rank {rank} has {have.type}, and its part of the sequential one is {value.type}")
