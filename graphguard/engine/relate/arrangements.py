"""Clean relations that are no placements: each rank holds a tile of the output at some place, transposed or reshaped.

Sound because every tile is cut out of the description of the sequential output and compared with what the rank holds, and the
tiles together must cover the output.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from graphguard.engine.algebra.sums import folded
from graphguard.engine.algebra.value import cut, same
from graphguard.engine.relate.outputs import Held, OutputPart, Relator, tile_of
from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import Lane, at_lane, collapse, everywhere
from graphguard.engine.terms.term import Undescribed, Value
from graphguard.graph.placement import candidates
from graphguard.relation.arrangement import Arrangement, Tile


def arranged(relator: Relator, whole: Value, output: Held) -> Arrangement | None:
    """Which tile of the output each rank holds, if each holds one and nothing is left out."""
    sizes = tuple(int(size) for size in whole.shape)
    tiles: dict[int, Tile] = {}
    for part in output.parts:
        found = _tiles(relator, whole, output, part)
        if found is None:
            return None
        tiles.update(zip(part.ranks, found, strict=True))
    found_all = Arrangement(sizes, tiles)
    return found_all if found_all.rebuilt("") is not None else None


def is_padded_to(piece: int, whole: int, members: int) -> bool:
    """Whether equal pieces are all of a whole and no more than padding: the smallest that are, or such as leave none empty."""
    return piece == -(-whole // members) or piece * (members - 1) < whole <= piece * members


def padded(relator: Relator, whole: Value, output: Held) -> Arrangement | None:
    """Which tile of the output each rank holds, if they hold equal pieces of it along a dim, or of it as one row, that go on
    beyond its end: buffers that were padded so that all ranks hold as much. What the padding holds is not claimed."""
    shapes = {tuple(part.value.shape) for part in output.parts if _count(part.value.shape) is not None}
    if len(shapes) != 1 or any(_count(part.value.shape) is None for part in output.parts):
        return None
    shape, sizes = tuple(int(size) for size in shapes.pop()), tuple(int(size) for size in whole.shape)
    for axes in _axes(output):
        members = prod(output.mesh.shape[axis] for axis in axes)
        along = [dim for dim in range(len(sizes)) if _is_longer(shape, sizes, dim, members)]
        as_row = is_padded_to(prod(shape), prod(sizes), members) and not len(shape) == len(sizes) == 1
        try:
            found = next(filter(None, (_padded_along(relator, whole, output, axes, dim) for dim in along)), None)
            if found is None and as_row:
                found = _padded_along(relator, relator.ops.reshape(whole, [prod(sizes)]), output, axes, 0, flat=True)
        except Undescribed:
            continue
        if found is not None:
            return Arrangement(sizes, found)
    return None


def _is_longer(piece: tuple[int, ...], whole: tuple[int, ...], dim: int, members: int) -> bool:
    """Whether pieces put one after the other along a dim go beyond the end of the whole, and fit it elsewhere."""
    if len(piece) != len(whole) or piece[:dim] + piece[dim + 1 :] != whole[:dim] + whole[dim + 1 :]:
        return False
    return piece[dim] * members > whole[dim] and is_padded_to(piece[dim], whole[dim], members)


def _axes(output: Held) -> Iterator[tuple[int, ...]]:
    """The axes of the mesh over which an output may be cut, in its order."""
    real = [axis for axis, size in enumerate(output.mesh.shape) if size > 1]
    for count in range(1, len(real) + 1):
        yield from itertools.combinations(real, count)


def _padded_along(
    relator: Relator, whole: Value, output: Held, axes: tuple[int, ...], dim: int, flat: bool = False
) -> dict[int, Tile] | None:
    """The tiles, if the ranks hold pieces one after the other along a dim."""
    tiles: dict[int, Tile] = {}
    lane_of = {rank: lane for lane, rank in enumerate(output.order)}
    places = np.indices(output.mesh.shape).reshape(len(output.mesh.shape), -1)
    position = np.zeros(output.mesh.size, dtype=np.int64)
    for axis in axes:
        position = position * output.mesh.shape[axis] + places[axis]
    full = int(whole.shape[dim])
    for part in output.parts:
        shape = tuple(int(size) for size in part.value.shape)
        value = relator.ops.reshape(part.value, [prod(shape)]) if flat else part.value
        size = int(value.shape[dim])
        start = np.minimum(position[[lane_of[rank] for rank in part.ranks]] * size, full)
        stop = np.minimum(start + size, full)
        wanted = cut(relator.table, whole, dim, collapse(start), collapse(stop))
        if not relator.equal(folded(relator.table, wanted), cut(relator.table, value, dim, 0, collapse(stop - start))):
            return None
        for rank, low, high in zip(part.ranks, start, stop, strict=True):
            spans = [(0, int(each)) for each in whole.shape]
            spans[dim] = (int(low), int(high))
            tiles[rank] = Tile(tuple(spans), tuple(range(len(spans))), shape, flat, padded=True)
    return tiles


def _tiles(relator: Relator, whole: Value, output: Held, part: OutputPart) -> list[Tile] | None:
    for order in _orders(relator.table, whole, part.value):
        try:
            turned = relator.ops.permute(whole, order)
            starts = tile_of(relator.table, turned, part.value)
        except Undescribed:
            continue
        if starts is not None:
            back = sorted(range(len(order)), key=order.__getitem__)
            spans = [(starts[dim], collapse(starts[dim] + part.value.shape[dim])) for dim in back]
            return _by_lane(part, spans, order)
    try:
        return _as_reshaped(relator, whole, output, part) or _as_flat(relator, whole, part)
    except Undescribed:
        return None


def _orders(table: Table, whole: Value, value: Value) -> Iterator[tuple[int, ...]]:
    """Orders of the output's dims in which a rank's tensor may be a part of it; as it is first."""
    if len(whole.shape) != len(value.shape):
        return
    straight = tuple(range(len(whole.shape)))
    for order in (straight,) if table.over("ordered_dims", len(straight)) else itertools.permutations(straight):
        if all(everywhere(size <= whole.shape[dim]) for size, dim in zip(value.shape, order, strict=True)):
            yield order


def _as_flat(relator: Relator, whole: Value, part: OutputPart) -> list[Tile] | None:
    """A run of the output's elements in memory order."""
    count, own = _count(whole.shape), _count(part.value.shape)
    if count is None or own is None:
        return None
    flat, mine = relator.ops.reshape(whole, [count]), relator.ops.reshape(part.value, [own])
    starts = tile_of(relator.table, flat, mine)
    return None if starts is None else _by_lane(part, [(starts[0], collapse(starts[0] + mine.shape[0]))], (0,), flat=True)


def _as_reshaped(relator: Relator, whole: Value, output: Held, part: OutputPart) -> list[Tile] | None:
    """What placements would give the ranks, in another shape."""
    sizes, count = [int(size) for size in whole.shape], _count(part.value.shape)
    lane_of = {rank: lane for lane, rank in enumerate(output.order)}
    for placements in candidates(len(sizes), output.mesh, sums=False):
        tiles = relator.tiles(sizes, output, placements)[[lane_of[rank] for rank in part.ranks]]
        shapes = tiles[:, :, 1] - tiles[:, :, 0]
        if count is None or (shapes != shapes[0]).any() or int(np.prod(shapes[0])) != count:
            continue
        mine = relator.ops.reshape(part.value, [int(size) for size in shapes[0]])
        if same(relator.expected(whole, output, placements, part), mine):
            spans = [(collapse(tiles[:, dim, 0]), collapse(tiles[:, dim, 1])) for dim in range(len(sizes))]
            return _by_lane(part, spans, tuple(range(len(sizes))))
    return None


def _count(shape: Sequence[Lane]) -> int | None:
    count = 1
    for size in shape:
        if not isinstance(size, int):
            return None
        count *= size
    return count


def _by_lane(part: OutputPart, spans: Sequence[tuple[Lane, Lane]], order: tuple[int, ...], flat: bool = False) -> list[Tile]:
    return [
        Tile(
            tuple((at_lane(low, lane), at_lane(high, lane)) for low, high in spans),
            order,
            tuple(at_lane(size, lane) for size in part.value.shape),
            flat,
        )
        for lane in range(len(part.ranks))
    ]
