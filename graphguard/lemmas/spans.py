"""The range of whole-number tensors, so that an index is known to lie inside of what it indexes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from graphguard.engine.algebra.grid import in_cells, unmasked
from graphguard.engine.store.table import Table
from graphguard.engine.tensors.choice import Piece, Reading
from graphguard.engine.tensors.integer import in_pieces
from graphguard.engine.terms.lane import Lane, at_lane, collapse, kinds, larger, smaller
from graphguard.engine.terms.term import IDX, Factor, Term, Value, bounds, extent
from graphguard.graph.ir import Constant

_LARGEST = np.iinfo(np.int64).max  # what masks scores is a whole number, too, and may be beyond it
Span = tuple[Lane, Lane]  # the smallest and the largest number, inclusive


def span_of(table: Table, value: Value) -> Span | None:
    """Numbers between which all elements lie, lane by lane; None if nothing is known."""
    if in_pieces(value):
        return _span_of_pieces(table, value)
    lanes, kind = kinds([*value.shape, *(n for term in value.terms for n in _numbers(term))])
    readings = [Reading.of(table, term) for term in value.terms]
    spans = [_lane_span(table, value, readings, lane) for lane in lanes]
    if any(span is None or max(map(abs, span)) > _LARGEST for span in spans):
        return None
    ends = np.array(spans, dtype=np.int64).reshape(len(lanes), 2)[kind]
    return collapse(ends[:, 0]), collapse(ends[:, 1])


def are_whole(table: Table, value: Value) -> bool:
    """Whether all elements are known to be whole numbers, whatever their dtype: sums of products of such as have a range."""
    return span_of(table, value) is not None


def _span_of_pieces(table: Table, value: Value) -> Span | None:
    low: Lane | None = None
    high: Lane | None = None
    for cell, inside in in_cells(table, value):
        here = tuple((0, extent(edge)) for edge in cell)
        piece = Value(tuple(size for _, size in here), tuple(unmasked(term, cell).with_(box=here) for term in inside))
        span = span_of(table, piece)
        if span is None:
            return None
        low = span[0] if low is None else smaller(low, span[0])
        high = span[1] if high is None else larger(high, span[1])
    return None if low is None or high is None else (low, high)


def _numbers(term: Term) -> Iterator[Lane]:
    yield term.weight
    for span in (*term.ranges.values(), *term.box):
        yield from span
    for factor in term.factors:
        for index in factor.at:
            yield index.offset


def _lane_span(table: Table, value: Value, readings: list[Reading | None], lane: int) -> tuple[int, int] | None:
    low = high = 0
    pieces: dict[Hashable, list[Piece]] = {}
    bounds_of: dict[Hashable, tuple[int, int] | None] = {}
    for term, reading in zip(value.terms, readings, strict=True):
        number = term.coefficient * at_lane(term.weight, lane)
        if not number:
            continue
        if number.denominator != 1:
            return None
        whole = all(
            at_lane(a, lane) == 0 and at_lane(b, lane) == at_lane(size, lane)
            for (a, b), size in zip(term.box, value.shape, strict=True)
        )
        found = reading.piece(table, int(number), lane) if reading is not None else None
        if reading is not None and found is not None:
            key, piece = found
            known = reading.span(table)
            if not whole:  # elsewhere the term is 0, whatever the subject is
                ends = _extremes([piece], known)
                if ends is None:
                    return None
                low, high = low + min(0, ends[0]), high + max(0, ends[1])
                continue
            pieces.setdefault(key, []).append(piece)
            bounds_of[key] = known
            continue
        span = _product_span(table, term, int(number), lane)
        if span is None:
            return None
        low, high = low + (span[0] if whole else min(0, span[0])), high + (span[1] if whole else max(0, span[1]))
    for key, group in pieces.items():
        ends = _extremes(group, bounds_of[key])
        if ends is None:
            return None
        low, high = low + ends[0], high + ends[1]
    return low, high


def _extremes(pieces: list[Piece], known: tuple[int, int] | None) -> tuple[int, int] | None:
    """The smallest and the largest sum of the pieces, over all values of the subject: it is linear between ends of ranges."""
    ends = {end for piece in pieces for span in piece.ranges or () for end in span}
    if known is None:
        if any(piece.ranges is None for piece in pieces):
            return None
        known = (min(ends, default=0) - 1, max(ends, default=0) + 1)  # beyond, all pieces are 0
    edges = sorted({*known, *(end for end in ends if known[0] < end < known[1])})
    sums = [_sum(pieces, v) for first, stop in pairwise(edges) for v in (first, stop - 1)]
    return (min(sums), max(sums)) if sums else (0, 0)


def _sum(pieces: list[Piece], subject: int) -> int:
    present = (p for p in pieces if p.ranges is None or any(low <= subject < high for low, high in p.ranges))
    return sum(piece.number * (subject if piece.linear else 1) for piece in present)


def _product_span(table: Table, term: Term, number: int, lane: int) -> tuple[int, int] | None:
    if term.summed:
        return None
    span = (number, number)
    for factor in term.factors:
        its = _factor_span(table, term, factor)
        if its is None:
            return None
        ends = [a * at_lane(b, lane) for a in span for b in its]
        span = min(ends), max(ends)
    return span


def _factor_span(table: Table, term: Term, factor: Factor) -> Span | None:
    if factor.atom is IDX:
        return bounds(factor.at[0], term.ranges) if factor.power == 1 else None
    if factor.atom.indicator:
        return (0, 1) if factor.power > 0 else None
    if factor.power != 1:
        return None
    known = table.facts.span(factor, term.ranges)
    if known is not None:
        return known[0], known[1] - 1
    return _constant_span(table, factor) if factor.atom.kind == "constant" else None


def _constant_span(table: Table, factor: Factor) -> Span | None:
    key: Any = next(key for (_, key), atom in table.atoms() if atom is factor.atom)
    if not isinstance(key, Constant) or not key.dtype.startswith(("int", "uint", "bool")):
        return None
    array = np.frombuffer(key.data, dtype=np.dtype(key.dtype))
    return (int(array.min()), int(array.max())) if array.size else (0, 0)
