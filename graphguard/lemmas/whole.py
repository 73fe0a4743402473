"""The range of whole-number tensors, so that an index is known to lie inside of what it indexes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from graphguard.engine.choice import Piece, Reading
from graphguard.engine.grid import in_cells, unmasked
from graphguard.engine.integer import in_pieces
from graphguard.engine.lane import Lane, at_lane, collapse, everywhere, larger, smaller, varies
from graphguard.engine.table import Table
from graphguard.engine.term import IDX, IMPULSE, Factor, Term, Undescribed, Value, bounds, extent
from graphguard.ir import Constant
from graphguard.lemmas.registry import Call

Span = tuple[Lane, Lane]  # the smallest and the largest number, inclusive


def infer(c: Call, index: Value, size: int) -> None:
    """What indexes a dim of the sequential program lies in it: an assumption on elements of inputs, which the report lists."""
    if not c.table.recording:
        return
    for _, terms in in_cells(c.table, index):
        factor = the_factor(terms)
        if factor is not None and factor.atom.kind == "input":
            c.table.facts.infer(factor, terms[0].ranges, [(0, size)])


def the_factor(terms: Sequence[Term]) -> Factor | None:
    """The one tensor that terms on the same elements are."""
    if len(terms) != 1 or len(terms[0].factors) != 1 or terms[0].coefficient != 1 or terms[0].summed or varies(terms[0].weight):
        return None
    (factor,) = terms[0].factors
    return factor if factor.power == 1 else None


def bounded(c: Call, value: Value, low: int, high: int) -> Value:
    """The value, noting that what it was described as lies in [low, high)."""
    for term in value.terms:
        if len(value.terms) == 1 and len(term.factors) == 1 and term.coefficient == 1 and term.factors[0].power == 1:
            atom = term.factors[0].atom
            if atom.kind in ("op", "function"):
                c.table.facts.declare(atom, low, high)
    return value


def hot(c: Call, index: Value, size: int, dim: int, *, wraps: bool = False) -> Value:
    """[index = v] for v in [0, size) along a new dim. Outside torch raises, or counts from the end: neither is a row of zeros.

    The sequential program is defined where it does not raise; of the ranks it has to be known that they do not."""
    parts = _dims_in_parts(index)
    if parts is not None:
        split = c.reshape(index, [size_of for group in parts for size_of in group])
        found = hot(c, split, size, sum(map(len, parts[:dim])), wraps=wraps)
        return c.reshape(found, [*index.shape[:dim], size, *index.shape[dim:]])
    span = span_of(c.table, index)
    if wraps or not c.table.recording:
        if wraps and c.table.recording and _is_open(c.table, index):
            infer(c, index, size)
            span = span_of(c.table, index)
        if wraps and span is not None and everywhere(span[1] < 0) and everywhere(span[0] >= -size):
            return c.one_hot(c.add(index, c.full((), size)), size, dim)
        if span is None or not (everywhere(span[0] >= 0) and (c.table.recording or everywhere(span[1] < size))):
            raise Undescribed("an index that may lie outside of the tensor that it indexes")
    infer(c, index, size)
    return c.one_hot(index, size, dim)


def _dims_in_parts(index: Value) -> list[list[int]] | None:
    """The sizes that a reshape has joined to dims, where an index was put together from pieces before: side by side in a dim
    that is joined with others they are no boxes any more, but they are if the dims are parted again."""
    if len(index.terms) < 2 or not any(f.atom is IMPULSE for term in index.terms for f in term.factors):
        return None
    found = [[[extent(term.ranges[v]) for v in group] or [1] for group in term.dims] for term in index.terms]
    sizes = [size for group in found[0] for size in group]
    if any(isinstance(size, np.ndarray) for size in sizes) or any(each != found[0] for each in found):
        return None
    return [[int(size) for size in group] for group in found[0]] if len(sizes) > len(index.shape) else None


def _is_open(table: Table, index: Value) -> bool:
    """Whether nothing has been said of the range of an input."""
    if len(index.terms) != 1:
        return False
    return all(table.facts.numbers(factor, index.terms[0].ranges) is None for factor in index.terms[0].factors)


def span_of(table: Table, value: Value) -> Span | None:
    """Numbers between which all elements lie, lane by lane; None if nothing is known."""
    if in_pieces(value):
        return _span_of_pieces(table, value)
    lanes = max((len(n) for term in value.terms for n in _numbers(term) if isinstance(n, np.ndarray)), default=1)
    readings = [Reading.of(table, term) for term in value.terms]
    spans = [_lane_span(table, value, readings, lane) for lane in range(lanes)]
    if any(span is None for span in spans):
        return None
    ends = np.array(spans, dtype=np.int64).reshape(lanes, 2)
    return collapse(ends[:, 0]), collapse(ends[:, 1])


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
        found = reading.piece(int(number), lane) if reading is not None else None
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
