"""Layouts that tensors say of themselves: as placements on the mesh of the check where they have such a form, else as code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import torch

from graphguard.capture.front import Captured
from graphguard.capture.torch.relation.inputs import Coordinate, Local, chunk
from graphguard.errors import UsageError
from graphguard.graph.ir import Graph, Layout, Mesh
from graphguard.graph.placement import REPLICATE, Partial, Placement, Shard, StridedShard, read
from graphguard.graph.rank_class import layout_at


def by_rank(captured: Captured, layout_of: Callable[[Graph], Layout | None]) -> list[Layout | None]:
    """The layout that each rank's tensor says of itself."""
    found: list[Layout | None] = [None] * len(captured.ranks)
    for each in captured.held:
        layout = layout_of(each.graph)
        if layout is not None:
            for lane, rank in enumerate(each.members):
                found[rank] = layout_at(layout, lane)
    return found


def placements_on(mesh: Mesh, layouts: Sequence[Layout | None]) -> dict[str, Placement] | None:
    """One placement per axis of the mesh, if all ranks have the same layout and its own mesh is made of these axes."""
    layouts = [None if layout is None else _without_single_ranks(layout) for layout in layouts]
    first = next((layout for layout in layouts if layout is not None), None)
    if first is None or any(layout is None or layout.placements != first.placements for layout in layouts):
        return None
    axes, placements = _axes(mesh, layouts), [each for each in map(read, first.placements) if isinstance(each, Placement)]
    if axes is None or len(placements) < len(first.placements):
        return None
    by_axis = dict(zip(axes, placements, strict=True))
    sharded = [placement.dim for placement in placements if isinstance(placement, Shard)]
    nests_otherwise = len(set(sharded)) < len(sharded) and [axis for axis in mesh.names if axis in by_axis] != list(axes)
    return None if nests_otherwise else {axis: by_axis.get(axis, REPLICATE) for axis in mesh.names}


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
    ranks = [mesh.rank_at({**here, **own.coordinate(position)}) for position in range(own.size)]
    return layout.mesh_ranks == tuple(ranks)


def has_sums(layouts: Sequence[Layout | None]) -> bool:
    return any(isinstance(read(text), Partial) for layout in layouts if layout is not None for text in layout.placements)


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
    for text, index, count in zip(layout.placements, position, layout.mesh_shape, strict=True):
        placement = read(text)
        if isinstance(placement, Shard):
            tensor = chunk(tensor, placement.dim, index, count)
        elif isinstance(placement, StridedShard):
            dim, factor = placement.dim, placement.factor
            if tensor.shape[dim] % (count * factor):
                raise unknown(name, f"{text} of a dim of size {tensor.shape[dim]} over {count} ranks is uneven")
            pieces = [chunk(block, dim, index, count) for block in tensor.chunk(factor, dim)]
            tensor = torch.cat(pieces, dim)
        elif placement != REPLICATE:
            raise unknown(name, f"it is placed by {text}")
    return tensor


def unknown(name: str, why: str) -> UsageError:
    return UsageError(f"the relation of the parameter {name.removeprefix('params.')!r} is unknown: {why}")
