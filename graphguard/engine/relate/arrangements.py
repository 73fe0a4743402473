"""Clean relations that are no placements: each rank holds a tile of the output at some place, transposed or reshaped, or
several side by side.

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
from graphguard.engine.relate.side_by_side import side_by_side
from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import Lane, at_lane, collapse, everywhere
from graphguard.engine.terms.term import Undescribed, Value
from graphguard.graph.placement import candidates
from graphguard.relation.arrangement import Arrangement, Spans, Tile

LaneSpans = Sequence[tuple[Lane, Lane]]


def arranged(relator: Relator, whole: Value, output: Held) -> Arrangement | None:
    """Which tiles of the output each rank holds, if all that each holds are such and nothing is left out."""
    sizes = tuple(int(size) for size in whole.shape)
    tiles: dict[int, tuple[Tile, ...]] = {}
    for part in output.parts:
        found = _tiles(relator, whole, output, part) or _rank_by_rank(relator, whole, output, part)
        if found is None:
            return None
        tiles.update(zip(part.ranks, found, strict=True))
    found_all = Arrangement(sizes, tiles)
    return found_all if found_all.rebuilt("") is not None else None


def _rank_by_rank(relator: Relator, whole: Value, output: Held, part: OutputPart) -> list[tuple[Tile, ...]] | None:
    """The tiles of ranks that are cut at places of their own."""
    if len(part.ranks) == 1 or relator.table.over("ranks_apart", len(part.ranks)):
        return None
    found = []
    for alone in relator.apart(part):
        tiles = _tiles(relator, whole, output, alone)
        if tiles is None:
            return None
        found += tiles
    return found


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
) -> dict[int, tuple[Tile, ...]] | None:
    """The tiles, if the ranks hold pieces one after the other along a dim."""
    tiles: dict[int, tuple[Tile, ...]] = {}
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
            spans, within = ([(0, int(each)) for each in whole.shape] for _ in range(2))
            spans[dim], within[dim] = (int(low), int(high)), (0, int(high - low))
            tiles[rank] = (Tile(tuple(spans), tuple(range(len(spans))), shape, flat, tuple(within)),)
    return tiles


def _tiles(relator: Relator, whole: Value, output: Held, part: OutputPart) -> list[tuple[Tile, ...]] | None:
    """By lane, what it holds: one tile, as it is, in another order of dims or in another shape; or several side by side."""
    orders = list(_orders(relator.table, whole, part.value))
    for order in orders:
        try:
            turned = relator.ops.permute(whole, order)
            starts = tile_of(relator.table, turned, part.value)
        except Undescribed:
            continue
        if starts is not None:
            return _by_lane(part, [_spans(part.value, starts, order)], order)
    try:
        found = _as_reshaped(relator, whole, output, part) or _as_flat(relator, whole, part)
    except Undescribed:
        found = None
    return found or next(filter(None, (_several(relator, whole, part, order) for order in orders)), None)


def _several(relator: Relator, whole: Value, part: OutputPart, order: tuple[int, ...]) -> list[tuple[Tile, ...]] | None:
    try:
        pieces = side_by_side(relator.table, relator.ops.permute(whole, order), part.value)
    except Undescribed:
        return None
    if pieces is None:
        return None
    spans, within = [], []
    for piece in pieces:
        shape = [*part.value.shape]
        shape[piece.dim] = piece.high - piece.low
        spans.append(_spans(Value(tuple(shape), ()), piece.starts, order))
        held: list[tuple[Lane, Lane]] = [(0, size) for size in part.value.shape]
        held[piece.dim] = (piece.low, piece.high)
        within.append(held)
    return _by_lane(part, spans, order, within=within)


def _spans(part: Value, starts: Sequence[Lane], order: tuple[int, ...]) -> list[tuple[Lane, Lane]]:
    """Where a part of the output, whose dims are in some order, lies in it."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return [(starts[dim], collapse(starts[dim] + part.shape[dim])) for dim in back]


def _orders(table: Table, whole: Value, value: Value) -> Iterator[tuple[int, ...]]:
    """Orders of the output's dims in which a rank's tensor may be a part of it; as it is first."""
    if len(whole.shape) != len(value.shape):
        return
    straight = tuple(range(len(whole.shape)))
    for order in (straight,) if table.over("ordered_dims", len(straight)) else itertools.permutations(straight):
        if all(everywhere(size <= whole.shape[dim]) for size, dim in zip(value.shape, order, strict=True)):
            yield order


def _as_flat(relator: Relator, whole: Value, part: OutputPart) -> list[tuple[Tile, ...]] | None:
    """A run of the output's elements in memory order."""
    count, own = _count(whole.shape), _count(part.value.shape)
    if count is None or own is None:
        return None
    flat, mine = relator.ops.reshape(whole, [count]), relator.ops.reshape(part.value, [own])
    starts = tile_of(relator.table, flat, mine)
    return None if starts is None else _by_lane(part, [_spans(mine, starts, (0,))], (0,), flat=True)


def _as_reshaped(relator: Relator, whole: Value, output: Held, part: OutputPart) -> list[tuple[Tile, ...]] | None:
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
            return _by_lane(part, [spans], tuple(range(len(sizes))))
    return None


def _count(shape: Sequence[Lane]) -> int | None:
    count = 1
    for size in shape:
        if not isinstance(size, int):
            return None
        count *= size
    return count


def _by_lane(
    part: OutputPart,
    tiles: Sequence[LaneSpans],
    order: tuple[int, ...],
    flat: bool = False,
    within: Sequence[LaneSpans] | None = None,
) -> list[tuple[Tile, ...]]:
    """By lane, its tiles. within: where each lies in what the lane holds, if that is not all of it."""

    def at(spans: LaneSpans, lane: int) -> Spans:
        return tuple((at_lane(low, lane), at_lane(high, lane)) for low, high in spans)

    held = [None] * len(tiles) if within is None else within
    return [
        tuple(
            Tile(
                at(spans, lane),
                order,
                tuple(at_lane(size, lane) for size in part.value.shape),
                flat,
                None if place is None else at(place, lane),
            )
            for spans, place in zip(tiles, held, strict=True)
        )
        for lane in range(len(part.ranks))
    ]
