"""`params=`: how each rank's parameters come from those of the sequential module, which are inputs named `params.<name>`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from graphguard.aten.operators import DTYPES
from graphguard.capture.program import PARAMETERS, FunctionProgram
from graphguard.capture.session import Captured, Subject
from graphguard.capture.session import capture as capture_subject
from graphguard.errors import UsageError
from graphguard.ir import Graph, Layout, Mesh
from graphguard.prune import prune
from graphguard.relation import Coordinate, Input, Local, chunk, localise

_SHARD = re.compile(r"Shard\(dim=(-?\d+)\)")
_PARTIAL = re.compile(r"Partial\((\w+)\)")
_STRIDED_SHARD = re.compile(r"_StridedShard\(dim=(-?\d+), sf=(\d+)\)")


def parameter_inputs(subject: Subject, captured: Captured, params: Any) -> dict[str, Input]:
    """The relation of every parameter, by the name of its input: as stated, else by DTensor layouts, else by equal shapes."""
    if params != "auto" and not isinstance(params, Mapping):
        raise UsageError(f"params= is {params!r}; write 'auto', or {{pattern: placement}}")
    names = [name for name in captured.sequential.inputs if name not in subject.inputs]
    stated: Mapping[str, Any] = {} if params == "auto" else params
    for pattern in stated:
        if not any(fnmatchcase(name.removeprefix(PARAMETERS), pattern) for name in names):
            raise UsageError(f"params= names {pattern!r}, which no parameter of the sequential module matches")
    return {name: _input(name, captured, subject.mesh, stated) for name in names}


def relations_with(subject: Subject, captured: Captured, parameters: Mapping[str, Input]) -> list[Graph]:
    """The input relations of all ranks, with those of the parameters."""
    _require_counterparts(captured, parameters)
    nothing = FunctionProgram(lambda **full: None, "sequential")
    inputs, local_inputs = {**subject.inputs, **parameters}, None
    if subject.local_inputs is not None:
        inputs = {name: Input(spec.shape, dtype=spec.dtype) for name, spec in inputs.items()}
        local_inputs = _beside(subject, parameters)
    relations = capture_subject(Subject(nothing, nothing, subject.mesh, inputs, local_inputs)).relations
    for rank, (relation, graph) in enumerate(zip(relations, captured.ranks, strict=True)):
        relation.outputs = {name: relation.outputs[name] for name in graph.inputs}
        prune(relation)
        _require_shapes(rank, relation, graph)
    return relations


def expected_gradients(captured: Captured, parameters: Mapping[str, Input]) -> dict[str, Any]:
    """Each gradient has its parameter's own relation. One that is a DTensor stands for its full tensor, so is left out."""
    by_path = {f"grads.{name.removeprefix(PARAMETERS)}": spec for name, spec in parameters.items()}
    return {
        path: spec.local or spec.placement
        for path, spec in by_path.items()
        if captured.sequential.outputs.get(path) is not None and not any(path in graph.layouts for graph in captured.ranks)
    }


def of_dtensors(captured: Captured, mesh: Mesh) -> dict[str, Any]:
    """What an output that is a DTensor says of itself: by its own placements it stands for the sequential output."""
    expected: dict[str, Any] = {}
    for path, value in captured.sequential.outputs.items():
        layouts = [graph.layouts.get(path) for graph in captured.ranks]
        known = [layout for layout in layouts if layout is not None]
        if value is None or not known:
            continue
        if any(placement.startswith("Partial") for layout in known for placement in layout.placements):
            expected[path] = _sums(path, known, mesh)
        else:
            expected[path] = _by_layout(path, layouts, mesh)
    return expected


def _sums(path: str, layouts: list[Layout], mesh: Mesh) -> tuple[Placement, ...]:
    """The placements of a DTensor that is a sum over ranks."""
    first = layouts[0]
    spans = first.mesh_shape == mesh.shape and first.mesh_ranks == tuple(range(mesh.size))
    if not spans or any(layout != first for layout in layouts) or len(layouts) < mesh.size:
        raise UsageError(
            f"output {path!r} is a DTensor placed by {', '.join(first.placements)} on a mesh of its own; "
            "state outputs= for it, or return its full tensor"
        )
    placements: list[Placement] = []
    for placement in first.placements:
        if shard := _SHARD.fullmatch(placement):
            placements.append(Shard(int(shard[1])))
        elif partial := _PARTIAL.fullmatch(placement):
            placements.append(Partial(partial[1]))
        elif placement == "Replicate()":
            placements.append(Replicate())
        else:
            raise UsageError(
                f"output {path!r} is a DTensor placed by {placement} beside a sum over ranks; return its full tensor"
            )
    return tuple(placements)


def _input(name: str, captured: Captured, mesh: Mesh, stated: Mapping[str, Any]) -> Input:
    value = captured.sequential.inputs[name]
    dtype = DTYPES[value.dtype]
    for pattern, relation in stated.items():
        if fnmatchcase(name.removeprefix(PARAMETERS), pattern):
            if callable(relation):
                return Input(value.shape, dtype=dtype, local=relation)
            return Input(value.shape, relation, dtype)
    layouts = [graph.input_layouts.get(name) for graph in captured.ranks]
    if any(layouts):
        return Input(value.shape, dtype=dtype, local=_by_layout(name, layouts, mesh))
    for rank, graph in enumerate(captured.ranks):
        if name in graph.inputs and graph.inputs[name].shape != value.shape:
            raise _unknown(name, f"it has shape {value.shape}, and {graph.inputs[name].shape} on rank {rank}")
    return Input(value.shape, dtype=dtype)


def _by_layout(name: str, layouts: list[Layout | None], mesh: Mesh) -> Local:
    by_coordinate = {tuple(mesh.coordinate(rank).items()): (rank, layout) for rank, layout in enumerate(layouts)}

    def local(full: torch.Tensor, coord: Coordinate) -> torch.Tensor:
        rank, layout = by_coordinate[tuple(coord.items())]
        return full if layout is None else _part(name, full, layout, rank)

    known = next(layout for layout in layouts if layout is not None)
    local.__name__ = f"a DTensor placed by {', '.join(known.placements)}"  # what a message calls it
    return local


def _part(name: str, tensor: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """The rank's part of a tensor that is laid out as a DTensor. Placements nest left to right."""
    mesh = Mesh(tuple((str(axis), size) for axis, size in enumerate(layout.mesh_shape)))
    position = mesh.coordinate(layout.mesh_ranks.index(rank)).values()
    for placement, index, count in zip(layout.placements, position, layout.mesh_shape, strict=True):
        if shard := _SHARD.fullmatch(placement):
            tensor = chunk(tensor, int(shard[1]), index, count)
        elif strided := _STRIDED_SHARD.fullmatch(placement):
            dim, factor = int(strided[1]), int(strided[2])
            if tensor.shape[dim] % (count * factor):
                raise _unknown(name, f"{placement} of a dim of size {tensor.shape[dim]} over {count} ranks is uneven")
            pieces = [chunk(block, dim, index, count) for block in tensor.chunk(factor, dim)]
            tensor = torch.cat(pieces, dim)
        elif placement != "Replicate()":
            raise _unknown(name, f"it is placed by {placement}")
    return tensor


def _beside(subject: Subject, parameters: Mapping[str, Input]) -> Callable[..., Any]:
    """The user's `local_inputs`, and the parameters beside what it returns."""

    def refuse(tensor: torch.Tensor, key: str, index: int, count: int) -> torch.Tensor:
        raise UsageError("params=: a Partial parameter beside local_inputs= is not supported")

    def local_inputs(full: dict[str, torch.Tensor], coord: Coordinate) -> dict[str, Any]:
        assert subject.local_inputs is not None
        mine = dict(subject.local_inputs({name: full[name] for name in subject.inputs}, dict(coord)))
        for name, spec in parameters.items():
            mine[name] = localise(name, full[name], spec, subject.mesh, coord, refuse)
        return mine

    return local_inputs


def _require_counterparts(captured: Captured, parameters: Mapping[str, Input]) -> None:
    for rank, graph in enumerate(captured.ranks):
        for name in graph.inputs:
            if name not in parameters and name not in captured.relations[rank].outputs:
                raise _unknown(name, f"rank {rank} has it, and the sequential module has no parameter of that name")


def _require_shapes(rank: int, relation: Graph, graph: Graph) -> None:
    for name, value in relation.outputs.items():
        have = graph.inputs[name]
        if value is not None and name.startswith(PARAMETERS) and value.type != have.type:
            raise _unknown(name, f"rank {rank} has {have.type}, and its part of the sequential one is {value.type}")


def _unknown(name: str, why: str) -> UsageError:
    return UsageError(f"the relation of the parameter {name.removeprefix(PARAMETERS)!r} is unknown: {why}")
