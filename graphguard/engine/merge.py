"""Placed monomials that are parts of one: equal ones add up, neighbouring ranges and boxes join.

Two terms join only if they agree in all but one place, and there abut in every lane: a summed range beside a summed range, or a
piece of the tensor beside the piece that continues it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from graphguard.engine.lane import collapse, equal
from graphguard.engine.monomial import Monomial, Range, Variable, canonical, extent, mentioned
from graphguard.engine.placed import Placed
from graphguard.engine.table import Table


def merged(table: Table, terms: Sequence[Placed]) -> tuple[Placed, ...]:
    """The terms with all that can be joined joined, in the order of their first parts."""
    result: list[Placed] = []
    for term in terms:
        _insert(table, result, term)
    return tuple(term for term in result if term.monomial.coefficient)


def _insert(table: Table, result: list[Placed], term: Placed) -> None:
    for place, other in enumerate(result):
        joined = _joined(table, other, term)
        if joined is not None:
            del result[place]
            _insert(table, result, joined)
            return
    result.append(term)


class _Form(NamedTuple):
    """A term with its variables in canonical order."""

    structure: Hashable
    order: tuple[Variable, ...]
    term: Placed


def _form(term: Placed) -> _Form:
    monomial = term.monomial
    found = canonical(monomial.factors, (), monomial.ranges)
    broadcast = tuple(v for dim in monomial.dims for v in dim if v not in found.order)
    order = (*found.order, *broadcast)
    place = {variable: number for number, variable in enumerate(order)}
    dims = tuple(tuple(place[v] for v in dim) for dim in monomial.dims)
    return _Form((found.key, dims, len(broadcast)), order, term)


def _joined(table: Table, a: Placed, b: Placed) -> Placed | None:
    for one, other in ((_form(x), _form(y)) for x in _promotions(table, a, b) for y in _promotions(table, b, a)):
        if one.structure == other.structure:
            joined = _join(one, other) or _join(other, one)
            if joined is not None:
                return replace(joined, monomial=table.fold(joined.monomial))
    return None


def _join(one: _Form, other: _Form) -> Placed | None:
    """One term for both, where `other` continues `one`."""
    mine, its = one.term.monomial, other.term.monomial
    counterpart = dict(zip(one.order, other.order, strict=True))
    ranges = [v for v, w in counterpart.items() if not _same(mine.ranges[v], its.ranges[w])]
    boxes = [d for d, (x, y) in enumerate(zip(one.term.box, other.term.box, strict=True)) if not _same(x, y)]
    if not ranges and not boxes:
        return replace(one.term, monomial=replace(mine, coefficient=mine.coefficient + its.coefficient))
    if mine.coefficient != its.coefficient or len(boxes) > 1:
        return None
    if not boxes:
        variable = ranges[0]
        span = _abutting(mine.ranges[variable], its.ranges[counterpart[variable]])
        if len(ranges) > 1 or span is None or variable not in mine.summed:
            return None
        return replace(one.term, monomial=replace(mine, ranges={**mine.ranges, variable: span}))
    return _side_by_side(one.term, other.term, counterpart, set(ranges), boxes[0])


def _side_by_side(
    one: Placed, other: Placed, counterpart: dict[Variable, Variable], different: set[Variable], dim: int
) -> Placed | None:
    """Two pieces of a tensor along a dim, as one: its outermost variable goes on, or nothing mentions it."""
    mine, its = one.monomial, other.monomial
    box = _abutting(one.box[dim], other.box[dim])
    if box is None or not mine.dims[dim]:
        return None
    variable = mine.dims[dim][0]
    span: Range | None
    if variable in mentioned(mine.factors):
        span = _abutting(mine.ranges[variable], its.ranges[counterpart[variable]])
    else:
        span = 0, collapse(extent(mine.ranges[variable]) + extent(its.ranges[counterpart[variable]]))
    if span is None or different - {variable}:
        return None
    return Placed(replace(mine, ranges={**mine.ranges, variable: span}), (*one.box[:dim], box, *one.box[dim + 1 :]))


def _promotions(table: Table, term: Placed, beside: Placed) -> Iterator[Placed]:
    """The term, and the ways to see a dim of size 1 as one element of a longer one, where it lies beside another term."""
    yield term
    monomial = term.monomial
    different = [d for d, (x, y) in enumerate(zip(term.box, beside.box, strict=True)) if not _same(x, y)]
    if len(different) != 1 or monomial.dims[different[0]]:
        return
    (dim,) = different
    for point in (v for v in monomial.summed if monomial.is_point(v)):
        dims = tuple((point,) if d == dim else group for d, group in enumerate(monomial.dims))
        yield replace(term, monomial=replace(monomial, dims=dims))
    fresh: Variable = next(table.names)
    dims = tuple((fresh,) if d == dim else group for d, group in enumerate(monomial.dims))
    yield replace(term, monomial=Monomial(monomial.coefficient, monomial.factors, {**monomial.ranges, fresh: (0, 1)}, dims))


def _same(a: Range, b: Range) -> bool:
    return equal(a[0], b[0]) and equal(a[1], b[1])


def _abutting(first: Range, second: Range) -> Range | None:
    return (first[0], second[1]) if equal(first[1], second[0]) else None
