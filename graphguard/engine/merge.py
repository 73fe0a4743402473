"""Terms that are parts of one: equal ones add up, neighbouring ranges and boxes join, and lanes that hold the like share a term.

Two terms join only if they agree in all but one place, and there abut in every lane: a summed range beside a summed range, or a
piece of the tensor beside the piece that continues it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import gcd, lcm

import numpy as np

from graphguard.engine.lane import Lane, collapse, equal, everywhere, varies
from graphguard.engine.table import Table
from graphguard.engine.term import Factor, Index, Range, Term, Undescribed, Variable, extent, mentioned, stride_order

Names = dict[Variable, Variable]
MOST_TERMS = 96
MOST_ORDERS = 6


def merged(table: Table, terms: Sequence[Term]) -> tuple[Term, ...]:
    """The terms with all that can be joined joined, in the order of their first parts."""
    if len(terms) < 2:
        return tuple(terms)
    result: list[Term] = []
    for term in terms:
        _insert(table, result, term)
        if len(result) > MOST_TERMS:
            raise Undescribed(f"a sum of more than {MOST_TERMS} terms")
    return tuple(result)


def _insert(table: Table, result: list[Term], term: Term) -> None:
    signature = _signature(term)
    for place, other in enumerate(result):
        if _signature(other) != signature:
            continue
        joined = _joined(table, other, term)
        if joined is not None:
            del result[place]
            settled = table.settle(joined) if joined.coefficient else None
            if settled is not None:
                _insert(table, result, settled)
            return
    result.append(term)


def _signature(term: Term) -> list[tuple[int, Fraction]]:
    return [(factor.atom.id, factor.power) for factor in term.factors]


def same_term(a: Term, b: Term) -> bool:
    """Whether two terms in normal form are alike in all but the names of variables."""
    return (
        a.coefficient == b.coefficient
        and _signature(a) == _signature(b)
        and equal(a.weight, b.weight)
        and all(_same(x, y) for x, y in zip(a.box, b.box, strict=True))
        and any(all(_same(a.ranges[v], b.ranges[w]) for v, w in names.items()) for names in matches(a, b))
    )


# ---------------------------------------------------------------------- which variables correspond
def matches(a: Term, b: Term, offsets: bool = True) -> Iterator[Names]:
    """The ways to rename the variables of one term to get the products of the other."""
    if len(a.ranges) != len(b.ranges) or any(len(x) != len(y) for x, y in zip(a.dims, b.dims, strict=True)):
        return
    for factors in _orders(b.factors):
        names = _match(a, factors, b, offsets)
        if names is not None:
            yield names


def _orders(factors: tuple[Factor, ...]) -> Iterator[tuple[Factor, ...]]:
    runs = [list(run) for _, run in itertools.groupby(factors, lambda f: (f.atom.id, f.power))]
    if all(len(run) == 1 for run in runs):
        yield factors
        return
    choices = itertools.product(*(itertools.permutations(run) for run in runs))
    for order in itertools.islice(choices, MOST_ORDERS):
        yield tuple(factor for run in order for factor in run)


def _match(a: Term, factors: tuple[Factor, ...], b: Term, offsets: bool) -> Names | None:
    names: Names = {}
    for x, y in zip(a.factors, factors, strict=True):
        for i, j in zip(x.at, y.at, strict=True):
            if len(i.terms) != len(j.terms) or (offsets and not equal(i.offset, j.offset)):
                return None
            for (v, s), (w, t) in zip(i.terms, j.terms, strict=True):
                if s != t or names.setdefault(v, w) != w:
                    return None
    for mine, its in zip(a.dims, b.dims, strict=True):
        for v, w in zip(mine, its, strict=True):
            if names.setdefault(v, w) != w:
                return None
    return names if len(set(names.values())) == len(names) == len(a.ranges) else None


# ---------------------------------------------------------------------- joining
def _joined(table: Table, a: Term, b: Term) -> Term | None:
    if (varies(a.weight) or varies(b.weight)) and everywhere((np.asarray(a.weight) * b.weight) == 0):
        return next((_laned(a, b, names) for names in matches(a, b, offsets=False)), None)
    for x, y in _promotions(table, a, b):
        for names in matches(x, y):
            joined = _join(x, y, names) or _join(y, x, {w: v for v, w in names.items()})
            if joined is not None:
                return joined
    return None


def _laned(a: Term, b: Term, names: Names) -> Term:
    """One term for lanes that hold the one and lanes that hold the other."""
    mine = np.asarray(a.weight) != 0
    mine = np.broadcast_to(mine, np.broadcast_shapes(mine.shape, np.shape(b.weight)))

    def choose(x: Lane, y: Lane) -> Lane:
        return x if equal(x, y) else collapse(np.where(mine, x, y))

    def span(x: Range, y: Range) -> Range:
        return choose(x[0], y[0]), choose(x[1], y[1])

    factors = tuple(
        f._replace(at=tuple(Index(i.terms, choose(i.offset, j.offset)) for i, j in zip(f.at, g.at, strict=True)))
        for f, g in zip(a.factors, b.factors, strict=True)
    )
    coefficient, weight = _total(a, b)
    ranges = {v: span(a.ranges[v], b.ranges[w]) for v, w in names.items()}
    return Term(coefficient, factors, ranges, a.dims, tuple(map(span, a.box, b.box)), weight)


def _total(a: Term, b: Term) -> tuple[Fraction, Lane]:
    """The sum of the two coefficients, lane by lane."""
    if not varies(a.weight) and not varies(b.weight):
        return a.coefficient * a.weight + b.coefficient * b.weight, 1
    common = Fraction(
        gcd(a.coefficient.numerator, b.coefficient.numerator), lcm(a.coefficient.denominator, b.coefficient.denominator)
    )
    weight = int(a.coefficient / common) * a.weight + int(b.coefficient / common) * b.weight
    return (Fraction(0), 1) if equal(weight, 0) else (common, collapse(weight))


def _join(one: Term, other: Term, names: Names) -> Term | None:
    """One term for both, where `other` continues `one`, or takes a part of it away."""
    ranges = [v for v, w in names.items() if not _same(one.ranges[v], other.ranges[w])]
    boxes = [d for d, (x, y) in enumerate(zip(one.box, other.box, strict=True)) if not _same(x, y)]
    if not ranges and not boxes:
        coefficient, weight = _total(one, other)
        return one.with_(coefficient=coefficient, weight=weight)
    if not equal(one.weight, other.weight) or len(boxes) > 1 or len(ranges) > 1:
        return None
    if not boxes:
        variable = ranges[0]
        mine, its = one.ranges[variable], other.ranges[names[variable]]
        span = None
        if variable not in one.visible:
            if one.coefficient == other.coefficient:
                span = _abutting(mine, its)
            elif one.coefficient == -other.coefficient:
                span = _without(mine, its)
        return None if span is None else one.with_(ranges={**one.ranges, variable: span})
    return _side_by_side(one, other, names, set(ranges), boxes[0]) if one.coefficient == other.coefficient else None


def _side_by_side(one: Term, other: Term, names: Names, different: set[Variable], dim: int) -> Term | None:
    """Two pieces of a tensor along a dim, as one: its outermost variable goes on, or nothing mentions it."""
    box = _abutting(one.box[dim], other.box[dim])
    if box is None or not one.dims[dim]:
        return None
    variable = one.dims[dim][0]
    span: Range | None
    if variable in mentioned(one.factors):
        span = _abutting(one.ranges[variable], other.ranges[names[variable]])
    else:
        span = 0, collapse(extent(one.ranges[variable]) + extent(other.ranges[names[variable]]))
    if span is None or different - {variable}:
        return None
    return one.with_(ranges={**one.ranges, variable: span}, box=(*one.box[:dim], box, *one.box[dim + 1 :]))


def _promotions(table: Table, a: Term, b: Term) -> Iterator[tuple[Term, Term]]:
    """The terms; or, where single elements lie beside each other or beside more of their kind, with these as a dim of one."""
    different = [d for d, (x, y) in enumerate(zip(a.box, b.box, strict=True)) if not _same(x, y)]
    if len(different) != 1 or (a.dims[different[0]] and b.dims[different[0]]):
        yield a, b
        return
    (dim,) = different
    if a.dims[dim]:
        yield from _promoted(table, a, b, dim)
    elif b.dims[dim]:
        yield from ((y, x) for x, y in _promoted(table, b, a, dim))
    elif not equal(a.box[dim][0], b.box[dim][0]):
        first, second = (a, b) if everywhere(a.box[dim][0] < b.box[dim][0]) else (b, a)
        strides = _distances(first, second)
        if strides is not None:
            yield _as_dim(table, first, dim, strides, 0), _as_dim(table, second, dim, strides, 1)


def _promoted(table: Table, a: Term, b: Term, dim: int) -> Iterator[tuple[Term, Term]]:
    """`b` holds one element along a dim where `a` holds several."""
    (variable, *rest) = a.dims[dim]
    if rest:
        return
    strides = [[dict(index.terms).get(variable, 0) for index in factor.at] for factor in a.factors]
    low: Lane | None = None
    for x, y, steps in zip(a.factors, b.factors, strides, strict=True):
        for i, j, step in zip(x.at, y.at, steps, strict=True):
            if step and low is None:
                distance = j.offset - i.offset
                if not everywhere(distance % step == 0):
                    return
                low = collapse(distance // step)
    yield a, _as_dim(table, b, dim, strides, low or 0)


def _distances(a: Term, b: Term) -> list[list[int]] | None:
    strides = []
    for x, y in zip(a.factors, b.factors, strict=True):
        row = []
        for i, j in zip(x.at, y.at, strict=True):
            distance = collapse(j.offset - i.offset)
            if not isinstance(distance, int):
                return None
            row.append(distance)
        strides.append(row)
    return strides


def _as_dim(table: Table, term: Term, dim: int, strides: list[list[int]], position: Lane) -> Term:
    """A dim of one element as a variable with these strides, at a position."""
    variable = next(table.names)
    factors = []
    for factor, steps in zip(term.factors, strides, strict=True):
        at = []
        for index, step in zip(factor.at, steps, strict=True):
            if step:
                terms = sorted([*index.terms, (variable, step)], key=stride_order)
                index = Index(tuple(terms), collapse(index.offset - step * position))
            at.append(index)
        factors.append(factor._replace(at=tuple(at)))
    ranges = {**term.ranges, variable: (position, collapse(position + 1))}
    return term.with_(factors=tuple(factors), ranges=ranges, dims=(*term.dims[:dim], (variable,), *term.dims[dim + 1 :]))


def _same(a: Range, b: Range) -> bool:
    return equal(a[0], b[0]) and equal(a[1], b[1])


def _abutting(first: Range, second: Range) -> Range | None:
    return (first[0], second[1]) if equal(first[1], second[0]) else None


def _without(whole: Range, part: Range) -> Range | None:
    """What is left of a range when one end of it is taken away."""
    if equal(whole[0], part[0]) and everywhere(whole[1] >= part[1]):
        return part[1], whole[1]
    if equal(whole[1], part[1]) and everywhere(whole[0] <= part[0]):
        return whole[0], part[0]
    return None
