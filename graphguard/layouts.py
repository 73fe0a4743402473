"""Layouts that tensors say of themselves: as placements on the mesh of the check where they have such a form, else as code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import permutations

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from graphguard.errors import UsageError
from graphguard.ir import Layout, Mesh
from graphguard.relation import Coordinate, Local, chunk

_SHARD = re.compile(r"Shard\(dim=(-?\d+)\)")
_PARTIAL = re.compile(r"Partial\((\w+)\)")
_STRIDED_SHARD = re.compile(r"_StridedShard\(dim=(-?\d+), sf=(\d+)\)")


def placements_on(mesh: Mesh, layouts: Sequence[Layout | None]) -> dict[str, Placement] | None:
    """One placement per axis of the mesh, if all ranks have the same layout and its own mesh is made of these axes."""
    layouts = [None if layout is None else _without_single_ranks(layout) for layout in layouts]
    first = next((layout for layout in layouts if layout is not None), None)
    if first is None or any(layout is None or layout.placements != first.placements for layout in layouts):
        return None
    axes, placements = _axes(mesh, layouts), [_placement(text) for text in first.placements]
    if axes is None or None in placements:
        return None
    by_axis = {axis: placement for axis, placement in zip(axes, placements, strict=True) if placement is not None}
    sharded = [placement.dim for placement in placements if isinstance(placement, Shard)]
    nests_otherwise = len(set(sharded)) < len(sharded) and [axis for axis in mesh.names if axis in by_axis] != list(axes)
    return None if nests_otherwise else {axis: by_axis.get(axis, Replicate()) for axis in mesh.names}


def _without_single_ranks(layout: Layout) -> Layout:
    """Along an axis of one rank nothing is placed."""
    kept = [index for index, size in enumerate(layout.mesh_shape) if size > 1]
    return layout._replace(
        mesh_shape=tuple(layout.mesh_shape[index] for index in kept),
        placements=tuple(layout.placements[index] for index in kept),
    )


def _axes(mesh: Mesh, layouts: Sequence[Layout | None]) -> tuple[str, ...] | None:
    """The axes that the layouts' own mesh consists of, in its order."""
    shape = next(layout.mesh_shape for layout in layouts if layout is not None)
    for axes in permutations(mesh.names, len(shape)):
        if all(layout is not None and _is_along(mesh, axes, rank, layout) for rank, layout in enumerate(layouts)):
            return axes
    return None


def _is_along(mesh: Mesh, axes: tuple[str, ...], rank: int, layout: Layout) -> bool:
    """Whether the layout's mesh is the part of the mesh that has this rank, along some axes."""
    sizes, own = dict(mesh.axes), Mesh(tuple((axis, dict(mesh.axes)[axis]) for axis in axes))
    if layout.mesh_shape != tuple(sizes[axis] for axis in axes):
        return False
    here = mesh.coordinate(rank)
    ranks = [_rank_at(mesh, {**here, **own.coordinate(position)}) for position in range(own.size)]
    return layout.mesh_ranks == tuple(ranks)


def _rank_at(mesh: Mesh, coordinate: Coordinate) -> int:
    rank = 0
    for axis, size in mesh.axes:
        rank = rank * size + coordinate[axis]
    return rank


def _placement(text: str) -> Placement | None:
    """As torch writes it; None for one that only code can say."""
    if text == "Replicate()":
        return Replicate()
    if shard := _SHARD.fullmatch(text):
        return Shard(int(shard[1]))
    partial = _PARTIAL.fullmatch(text)
    return Partial(partial[1]) if partial else None


def has_sums(layouts: Sequence[Layout | None]) -> bool:
    return any(text.startswith("Partial") for layout in layouts if layout is not None for text in layout.placements)


def text_of(layout: Layout) -> str:
    return ", ".join(layout.placements)


# ---------------------------------------------------------------------- as code
def part_of(name: str, layouts: Sequence[Layout | None], mesh: Mesh) -> Local:
    """Each rank's part of the full tensor, by its own layout; a rank without a layout has the whole."""
    by_coordinate = {tuple(mesh.coordinate(rank).items()): (rank, layout) for rank, layout in enumerate(layouts)}

    def local(full: torch.Tensor, coord: Coordinate) -> torch.Tensor:
        rank, layout = by_coordinate[tuple(coord.items())]
        return full if layout is None else _part(name, full, layout, rank)

    known = next(layout for layout in layouts if layout is not None)
    local.__name__ = f"a DTensor placed by {text_of(known)}"  # what a message calls it
    return local


def _part(name: str, tensor: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """Placements nest left to right."""
    mesh = Mesh(tuple((str(axis), size) for axis, size in enumerate(layout.mesh_shape)))
    position = mesh.coordinate(layout.mesh_ranks.index(rank)).values()
    for placement, index, count in zip(layout.placements, position, layout.mesh_shape, strict=True):
        if shard := _SHARD.fullmatch(placement):
            tensor = chunk(tensor, int(shard[1]), index, count)
        elif strided := _STRIDED_SHARD.fullmatch(placement):
            dim, factor = int(strided[1]), int(strided[2])
            if tensor.shape[dim] % (count * factor):
                raise unknown(name, f"{placement} of a dim of size {tensor.shape[dim]} over {count} ranks is uneven")
            pieces = [chunk(block, dim, index, count) for block in tensor.chunk(factor, dim)]
            tensor = torch.cat(pieces, dim)
        elif placement != "Replicate()":
            raise unknown(name, f"it is placed by {placement}")
    return tensor


def unknown(name: str, why: str) -> UsageError:
    return UsageError(f"the relation of the parameter {name.removeprefix('params.')!r} is unknown: {why}")
