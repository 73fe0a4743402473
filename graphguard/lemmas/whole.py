"""The range of whole-number tensors, so that an index is known to lie inside of what it indexes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from graphguard.engine.lane import Lane, collapse, equal, everywhere, larger, smaller
from graphguard.engine.table import Table
from graphguard.engine.term import IDX, Factor, Term, Undescribed, Value, bounds
from graphguard.ir import Constant
from graphguard.lemmas.registry import Call

Span = tuple[Lane, Lane]  # the smallest and the largest number, inclusive
_NOTHING: Span = (0, 0)


def declare(c: Call, index: Value, size: int) -> None:
    """What indexes a dim of the sequential program lies in it: an assumption on inputs, which the report lists."""
    if not c.table.recording or len(index.terms) != 1:
        return
    (term,) = index.terms
    if len(term.factors) == 1 and term.coefficient == 1 and not term.summed:
        (factor,) = term.factors
        if factor.atom.kind == "input" and factor.power == 1:
            c.table.declare(factor.atom, 0, size)


def bounded(c: Call, value: Value, low: int, high: int) -> Value:
    """The value, noting that what it was described as lies in [low, high)."""
    for term in value.terms:
        if len(value.terms) == 1 and len(term.factors) == 1 and term.coefficient == 1 and term.factors[0].power == 1:
            atom = term.factors[0].atom
            if atom.kind in ("op", "function"):
                c.table.declare(atom, low, high)
    return value


def hot(c: Call, index: Value, size: int, dim: int, *, wraps: bool = False) -> Value:
    """[index = v] for v in [0, size) along a new dim. Outside of it torch raises, or counts from the end: neither is a zero row.

    The sequential program is defined where it does not raise; of the ranks it has to be known that they do not."""
    span = span_of(c.table, index)
    if wraps or not c.table.recording:
        if wraps and c.table.recording and _is_open(c.table, index):
            declare(c, index, size)
            span = span_of(c.table, index)
        if wraps and span is not None and everywhere(span[1] < 0) and everywhere(span[0] >= -size):
            return c.one_hot(c.add(index, c.full((), size)), size, dim)
        if span is None or not (everywhere(span[0] >= 0) and (c.table.recording or everywhere(span[1] < size))):
            raise Undescribed("an index that may lie outside of the tensor that it indexes")
    declare(c, index, size)
    return c.one_hot(index, size, dim)


def _is_open(table: Table, index: Value) -> bool:
    """Whether nothing has been said of the range of an input."""
    return len(index.terms) == 1 and all(f.atom.id not in table.bounds for f in index.terms[0].factors)


def span_of(table: Table, value: Value) -> Span | None:
    """Numbers between which all elements lie, lane by lane; None if nothing is known."""
    total: Span = _NOTHING
    chosen: dict[Hashable, Span] = {}
    for term in value.terms:
        found = _delta_span(table, term)
        if found is not None:
            key, span = found
            if not _covers(term, value):
                key = (key, id(term))
            known = chosen.get(key, _NOTHING)
            chosen[key] = _sum(known, span)
            continue
        plain = _term_span(table, term)
        if plain is None:
            return None
        total = _sum(total, plain if _covers(term, value) else _with_zero(plain))
    for span in chosen.values():
        total = _sum(total, _with_zero(span))
    return total


def _covers(term: Term, value: Value) -> bool:
    return all(equal(low, 0) and equal(high, size) for (low, high), size in zip(term.box, value.shape, strict=True))


def _sum(a: Span, b: Span) -> Span:
    return collapse(a[0] + b[0]), collapse(a[1] + b[1])


def _with_zero(span: Span) -> Span:
    return smaller(span[0], 0), larger(span[1], 0)


def _scaled(span: Span, number: Lane) -> Span:
    ends = span[0] * number, span[1] * number
    return smaller(*map(collapse, ends)), larger(*map(collapse, ends))


def _multiple(term: Term) -> Lane | None:
    return collapse(int(term.coefficient) * term.weight) if term.coefficient.denominator == 1 else None


def _term_span(table: Table, term: Term) -> Span | None:
    number = _multiple(term)
    if number is None or term.summed:
        return None
    span: Span = (1, 1)
    for factor in term.factors:
        its = _factor_span(table, term, factor)
        if its is None:
            return None
        ends = [collapse(a * b) for a in span for b in its]
        span = smaller(smaller(ends[0], ends[1]), smaller(ends[2], ends[3])), larger(larger(ends[0], ends[1]), larger(ends[2], ends[3]))
    return _scaled(span, number)


def _factor_span(table: Table, term: Term, factor: Factor) -> Span | None:
    if factor.atom is IDX:
        return bounds(factor.at[0], term.ranges) if factor.power == 1 else None
    if factor.atom.indicator:
        return (0, 1) if factor.power > 0 else None
    if factor.power != 1:
        return None
    known = table.bounds.get(factor.atom.id)
    if known is not None:
        return known[0], known[1] - 1
    return _constant_span(table, factor) if factor.atom.kind == "constant" else None


def _constant_span(table: Table, factor: Factor) -> Span | None:
    key: Any = next(key for (_, key), atom in table.atoms() if atom is factor.atom)
    if not isinstance(key, Constant) or not key.dtype.startswith(("int", "uint", "bool")):
        return None
    array = np.frombuffer(key.data, dtype=np.dtype(key.dtype))
    return (int(array.min()), int(array.max())) if array.size else _NOTHING


def _delta_span(table: Table, term: Term) -> tuple[Hashable, Span] | None:
    """For a term of `where(low <= ids < high, ids - low, 0)`: what it adds where the mask is 1, and a name for the mask."""
    deltas = [f for f in term.factors if f.atom.kind == "delta"]
    number = _multiple(term)
    if len(deltas) != 1 or len(term.summed) != 1 or number is None:
        return None
    (delta,), (variable,) = deltas, term.summed
    last = delta.at[-1]
    if last.terms != ((variable, 1),):
        return None
    rest = [f for f in term.factors if f is not delta]
    low, high = term.ranges[variable]
    subject = collapse(low + last.offset), collapse(high - 1 + last.offset)
    key = delta.place, *map(_key, subject)
    if not rest:
        return key, _scaled((1, 1), number)
    if len(rest) == 1 and rest[0].power == 1 and _is_subject(table, rest[0], delta):
        return key, _scaled(subject, number)
    return None


def _key(number: Lane) -> Hashable:
    return number if isinstance(number, int) else number.tobytes()


def _is_subject(table: Table, factor: Factor, delta: Factor) -> bool:
    """Whether the factor is what the delta compares, at the same position."""
    definition = table.definitions.get(delta.atom.id)
    if definition is None or len(definition.operands[0]) != 1:
        return False
    (product,) = definition.operands[0]
    if len(product.factors) != 1 or product.factors[0].atom is not factor.atom or product.label[1] != 1:  # type: ignore[index]
        return False
    axes = [index.terms[0][0] for index in product.factors[0].at]
    if any(len(i.terms) != 1 or i.offset != 0 or i.terms[0][1] != 1 for i in product.factors[0].at):
        return False
    return all(factor.at[n].key == delta.at[-1 - axis].key for n, axis in enumerate(axes))
