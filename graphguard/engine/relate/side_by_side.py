"""Ranks that hold several tiles of an output side by side along a dim: zigzag sequences, shards of fused weights.

The tiles must come in the order of the output and none of them twice. Rows in another order are no relation that code means
without saying so: a gather that is not put back in order looks just like them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from graphguard.engine.algebra.value import cut
from graphguard.engine.relate.outputs import tile_of
from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import Lane, collapse, equal, everywhere
from graphguard.engine.terms.term import Term, Undescribed, Value, extent


@dataclass(frozen=True)
class Piece:
    """A tile that a tensor holds between two positions of a dim. starts: where it lies in the output."""

    dim: int
    low: int
    high: int
    starts: list[Lane]


def side_by_side(table: Table, whole: Value, part: Value) -> list[Piece] | None:
    """The tiles that a tensor is made of, if it is made of such along one dim."""
    if len(whole.shape) != len(part.shape):
        return None
    for dim, size in enumerate(part.shape):
        for edges in _edges(table, part, dim) if isinstance(size, int) else ():
            pieces = _pieces(table, whole, part, dim, edges)
            if pieces is not None:
                return pieces
    return None


def _edges(table: Table, part: Value, dim: int) -> Iterator[list[int]]:
    """Where a tensor may be cut: where its terms begin and end, and where the rows of joined dims do; else everywhere."""
    size = part.shape[dim]
    assert isinstance(size, int)
    found = {0, size}
    for term in part.terms:
        found.update(_rows(term, dim))
    edges = sorted(found)
    if len(edges) > 2 and not table.over("tiles", len(edges) - 1):
        yield edges
    if 2 <= size != len(edges) - 1 and not table.over("tiles", size):
        yield list(range(size + 1))


def _rows(term: Term, dim: int) -> Iterator[int]:
    low, high = term.box[dim]
    if not isinstance(low, int) or not isinstance(high, int):
        return
    group = term.dims[dim]
    row = extent(term.ranges[group[-1]]) if len(group) > 1 else high - low
    yield from range(low, high, row) if isinstance(row, int) and row > 0 else (low,)
    yield high


def _pieces(table: Table, whole: Value, part: Value, dim: int, edges: list[int]) -> list[Piece] | None:
    pieces: list[Piece] = []
    for low, high in pairwise(edges):
        try:
            starts = tile_of(table, whole, cut(table, part, dim, low, high))
        except Undescribed:
            return None
        if starts is None or not _is_next(pieces, starts, dim):
            return None
        if pieces and equal(starts[dim], _end(pieces[-1])):
            pieces[-1] = Piece(dim, pieces[-1].low, high, pieces[-1].starts)
        else:
            pieces.append(Piece(dim, low, high, starts))
    return pieces


def _end(piece: Piece) -> Lane:
    return collapse(piece.starts[piece.dim] + piece.high - piece.low)


def _is_next(pieces: list[Piece], starts: list[Lane], dim: int) -> bool:
    """Whether a tile lies behind the one before it in the output, and beside it in all other dims."""
    if not pieces:
        return True
    beside = all(equal(a, b) for other, (a, b) in enumerate(zip(pieces[-1].starts, starts, strict=True)) if other != dim)
    return beside and everywhere(starts[dim] >= _end(pieces[-1]))
