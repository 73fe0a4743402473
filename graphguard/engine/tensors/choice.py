"""Whole-number tensors that depend on where another one lies, such as `where(lo <= ids < hi, ids - lo, 0)`.

Such a tensor is a sum of pieces: a number, or the subject itself, where the subject is in a range. In each lane that is a
function of the subject, linear in segments, so its one-hot rows are known: those of a shifted subject, or one row.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from graphguard.engine.algebra.grid import covers
from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import Lane, at_lane, collapse, varies
from graphguard.engine.terms.summand_order import kinds_in
from graphguard.engine.terms.term import (
    IMPULSE,
    ONE,
    Atom,
    Factor,
    Index,
    Term,
    Undescribed,
    Value,
    combined,
    extent,
    substituted,
)


class Piece(NamedTuple):
    """number · subject, or the number alone, where the subject is in one of the ranges (or anywhere)."""

    number: int
    linear: bool
    ranges: list[tuple[int, int]] | None


class Reading:
    """A term that depends on one whole-number tensor, in all lanes."""

    def __init__(self, term: Term, subject: tuple[Atom, tuple[Index, ...]], values: Index | None, others: list[Factor]):
        atom, at = subject
        self.term, self._values, self._others = term, values, others
        self._subject = _Place(term, atom, at)
        self._other = _Place(term, others[0].atom, others[0].at) if others else None

    @staticmethod
    def of(table: Table, term: Term) -> Reading | None:
        deltas = [f for f in term.factors if f.atom.kind == "delta" and f.power == 1]
        others = [f for f in term.factors if not any(f is delta for delta in deltas)]
        if len(others) > 1 or len(deltas) > 1 or any(f.power != 1 for f in others):
            return None
        if not deltas:
            if not others or term.summed or others[0].atom.kind == "idx" or table.facts.span(others[0], term.ranges) is None:
                return None
            return Reading(term, (others[0].atom, others[0].at), None, others)
        subject, values = _subject(table, deltas[0]), deltas[0].at[-1]
        if subject is None or not _is_over_summed(term, values) or (others and others[0].atom is not subject[0]):
            return None
        return Reading(term, subject, values, others)

    def span(self, table: Table) -> tuple[int, int] | None:
        """A range that all elements lie in that are read."""
        return table.facts.span(Factor(self._subject.atom, self._subject.at), self.term.ranges)

    def piece(self, table: Table, number: int, lane: int) -> tuple[Hashable, Piece] | None:
        """In one lane: where the tensor is read, and the piece."""
        place = self._subject.in_lane(lane)
        if self._values is None:
            return place, Piece(number, True, None)
        ranges = _values(table, self.term, self._values, lane)
        if ranges is None or (self._other is not None and self._other.in_lane(lane) != place):
            return None
        return place, Piece(number, bool(self._others), ranges)


def _subject(table: Table, delta: Factor) -> tuple[Atom, tuple[Index, ...]] | None:
    """What a delta compares, if that is one tensor, and where it is read."""
    (products,) = table.definitions[delta.atom].operands
    if len(products) != 1 or len(products[0].factors) != 1 or products[0].label[1] != 1:  # type: ignore[index]
        return None
    (factor,) = products[0].factors
    if factor.power != 1 or products[0].extents:
        return None
    axes = {-1 - n: index for n, index in enumerate(delta.at[:-1])}
    return factor.atom, tuple(substituted(index, axes) for index in factor.at)


class _Place:
    """Where a term reads an atom."""

    def __init__(self, term: Term, atom: Atom, at: tuple[Index, ...]):
        self.atom, self.at = atom, at
        names = {v: (dim, n) for dim, group in enumerate(term.dims) for n, v in enumerate(group)}
        strides = tuple(tuple(sorted((names.get(v, (-1, v)), stride) for v, stride in index.terms)) for index in at)
        self._form = atom.id, strides, tuple(map(len, term.dims))
        starts = [index.offset + sum(stride * term.ranges[v][0] for v, stride in index.terms) for index in at]
        self._numbers: list[Lane] = [*starts, *(extent(term.ranges[v]) for group in term.dims for v in group)]

    def in_lane(self, lane: int) -> Hashable:
        """Equal for an atom read at the same positions, whatever the variables are called."""
        return self._form, tuple([at_lane(number, lane) for number in self._numbers])


def _is_over_summed(term: Term, index: Index) -> bool:
    """Whether the index is over all summed variables, and nothing but deltas has them."""
    summed = set(term.summed)
    mention = [f for f in term.factors if any(v in summed for v in f.variables())]
    return {v for v, _ in index.terms} == summed and all(f.atom.kind == "delta" for f in mention)


def _values(table: Table, term: Term, index: Index, lane: int) -> list[tuple[int, int]] | None:
    """The numbers that an index over summed variables takes, as ranges; None if there are too many."""
    ranges = [(at_lane(index.offset, lane), at_lane(index.offset, lane) + 1)]
    for variable, stride in sorted(index.terms, key=lambda each: abs(each[1])):
        low, high = (at_lane(end, lane) for end in term.ranges[variable])
        if abs(stride) == 1 and ranges[0][1] - ranges[0][0] == 1 and len(ranges) == 1:
            start = ranges[0][0] + min(stride * low, stride * (high - 1))
            ranges = [(start, start + max(0, high - low))]
        elif table.over("index_runs", (high - low) * len(ranges)):
            return None
        else:
            ranges = [(a + stride * v, b + stride * v) for v in range(low, high) for a, b in ranges]
    spans = sorted(ranges)
    return None if any(first[1] > second[0] for first, second in pairwise(spans)) else spans


# ---------------------------------------------------------------------- one-hot rows
class Segment(NamedTuple):
    """The subject plus a number, or the number alone, where the subject is in [low, high)."""

    low: int
    high: int
    linear: bool
    number: int


def segments_of(table: Table, value: Value) -> tuple[Term, Lane, list[list[Segment]]]:
    """A term with the subject's delta, the number that the tensor is where no segment is, and the segments of each lane."""
    everywhere = [term for term in value.terms if not varies(term.weight)]  # where a lane has no share, a term says nothing
    example = next((term for term in everywhere if any(f.atom.kind == "delta" for f in term.factors)), None)
    if example is None:
        raise Undescribed("an index that is computed from several tensors")
    lanes, kind = kinds_in(value.terms)
    readings = [Reading.of(table, term) for term in value.terms]
    by_kind = [_segments(table, value, readings, lane) for lane in lanes]
    by_lane = [by_kind[each] for each in kind.tolist()]
    return example, collapse(np.array([base for base, _ in by_lane])), [segments for _, segments in by_lane]


def _segments(table: Table, value: Value, readings: list[Reading | None], lane: int) -> tuple[int, list[Segment]]:
    base, pieces, places = 0, list[Piece](), set[Hashable]()
    for term, reading in zip(value.terms, readings, strict=True):
        number = term.coefficient * at_lane(term.weight, lane)
        if not number:
            continue
        if number.denominator != 1 or not covers(term.box, value.shape):
            raise Undescribed("an index that is computed from several tensors")
        if not term.factors and not term.summed:
            base += int(number)
            continue
        found = reading.piece(table, int(number), lane) if reading is not None else None
        if found is None or found[1].ranges is None:
            raise Undescribed("an index that is computed from several tensors")
        places.add(found[0])
        pieces.append(found[1])
    if len(places) > 1:
        raise Undescribed("an index that is chosen in several ways")
    return base, _joined(base, pieces)


def _joined(base: int, pieces: list[Piece]) -> list[Segment]:
    """Neighbours that continue each other are one segment; where the tensor is the base there is none."""
    found: list[Segment] = []
    edges = sorted({end for piece in pieces for span in piece.ranges or () for end in span})
    for low, high in pairwise(edges):
        here = [p for p in pieces if any(a <= low < b for a, b in p.ranges or ())]
        slope = sum(piece.number for piece in here if piece.linear)
        number = base + sum(piece.number for piece in here if not piece.linear)
        if slope not in (0, 1):
            raise Undescribed("an index that is a multiple of another one")
        if (slope, number) == (0, base):
            continue
        if found and found[-1][1:] == (low, bool(slope), number):
            found[-1] = found[-1]._replace(high=high)
        else:
            found.append(Segment(low, high, bool(slope), number))
    return found


def rows_of(table: Table, value: Value, size: int, dim: int) -> tuple[list[Term], list[Term], Lane]:
    """The one-hot rows of all segments, the masks of where the segments are, and the number elsewhere."""
    example, base, by_lane = segments_of(table, value)
    rows: list[Term] = []
    masks: list[Term] = []
    for linear in (True, False):
        chosen = [[segment for segment in segments if segment.linear == linear] for segments in by_lane]
        for place in range(max(map(len, chosen))):
            slot = [segments[place] if place < len(segments) else Segment(0, 0, linear, 0) for segments in chosen]
            mask = _mask(table, example, slot)
            number = collapse(np.array([segment.number for segment in slot]))
            row = row_at(mask, size, dim, next(table.names), mask.summed[0] if linear else None, number)
            masks.append(mask)
            settled = table.settle(row)
            rows += [] if settled is None else [settled]
    return rows, masks, base


def _mask(table: Table, example: Term, slot: list[Segment]) -> Term:
    """1 where the subject is in the segment of the lane."""
    delta = next(factor for factor in example.factors if factor.atom.kind == "delta")
    variable = next(table.names)
    span = (collapse(np.array([segment.low for segment in slot])), collapse(np.array([segment.high for segment in slot])))
    ranges = {v: each for v, each in example.ranges.items() if v not in example.summed}
    opened = delta._replace(at=(*delta.at[:-1], Index(((variable, 1),))))
    return example.with_(coefficient=ONE, weight=1, factors=(opened,), ranges={**ranges, variable: span})


def row_at(mask: Term, size: int, dim: int, variable: int, subject: int | None, number: Lane) -> Term:
    """[subject + number = v] along a new dim, or [number = v] without a subject, where the mask is 1."""
    from_here = ((variable, 1),) if subject is None else ((variable, 1), (subject, -1))
    position = combined([Index(from_here, collapse(-number))])
    return mask.with_(
        factors=(*mask.factors, Factor(IMPULSE, (position,))),
        ranges={**mask.ranges, variable: (0, size)},
        dims=(*mask.dims[:dim], (variable,), *mask.dims[dim:]),
        box=(*mask.box[:dim], (0, size), *mask.box[dim:]),
    )
