"""What does not multiply: sums, cuts, concats, permutations, changes of shape, and reading other lanes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from graphguard.engine.lane import Lane, Lanes, collapse, equal, everywhere, larger, smaller, take
from graphguard.engine.merge import merged, same_term
from graphguard.engine.table import Table
from graphguard.engine.term import Index, Range, Term, Undescribed, Value, extent

__all__ = ["add", "concat", "cut", "permute", "same", "scale", "taken"]


def add(table: Table, values: Sequence[Value]) -> Value:
    terms = [term for value in values for term in value.terms]
    return Value(values[0].shape, merged(table, terms))


def scale(value: Value, number: Fraction) -> Value:
    if number == 1:
        return value
    return Value(value.shape, tuple(t.with_(coefficient=t.coefficient * number) for t in value.terms) if number else ())


def permute(value: Value, order: Sequence[int]) -> Value:
    terms = tuple(t.with_(dims=tuple(t.dims[d] for d in order), box=tuple(t.box[d] for d in order)) for t in value.terms)
    return Value(tuple(value.shape[d] for d in order), terms)


def cut(table: Table, value: Value, dim: int, start: Lane, stop: Lane) -> Value:
    """The part of a tensor between two local positions of a dim."""
    size = value.shape[dim]
    shape = (*value.shape[:dim], collapse(stop - start), *value.shape[dim + 1 :])
    if equal(start, 0) and equal(stop, size):
        return value
    terms = []
    for term in value.terms:
        low, high = term.box[dim]
        first, last = larger(low, start), smaller(high, stop)
        last = larger(first, last)
        for part in _pieces(term, dim, collapse(first - low), collapse(last - low)):
            settled = table.settle(moved(part, dim, collapse(-start)))
            if settled is not None:
                terms.append(settled)
    return Value(shape, merged(table, terms))


def _pieces(term: Term, dim: int, start: Lane, stop: Lane) -> list[Term]:
    """The part of a term between two positions of a dim: three terms where it begins and ends within rows of joined dims."""
    try:
        return [cut_term(term, dim, start, stop)]
    except Undescribed:
        group = term.dims[dim]
        if len(group) != 2:
            raise
    inner = group[1]
    width = _even(extent(term.ranges[inner]))
    after, last = collapse(-(-start // width)), collapse(stop // width)
    head = smaller(collapse(after * width), stop)
    tail = larger(collapse(last * width), head)
    pieces = [_row_part(term, dim, start, head, width)]
    if not everywhere(tail <= head):
        pieces.append(_rows(term, dim, after, larger(last, after), width))
    if not everywhere(stop <= tail):
        pieces.append(_row_part(term, dim, tail, stop, width))
    return pieces


def _row_part(term: Term, dim: int, start: Lane, stop: Lane, width: int) -> Term:
    """What lies within one row; nothing in lanes where the positions are equal."""
    outer, inner = term.dims[dim]
    row = collapse(start // width)
    first, low = term.ranges[outer][0], term.ranges[inner][0]
    columns = (collapse(low + start - row * width), collapse(low + stop - row * width))
    ranges = {**term.ranges, outer: (collapse(first + row), collapse(first + row + 1)), inner: columns}
    return term.with_(ranges=ranges, box=_boxed(term, dim, start, stop))


def _rows(term: Term, dim: int, first: Lane, last: Lane, width: int) -> Term:
    outer, _ = term.dims[dim]
    low = term.ranges[outer][0]
    ranges = {**term.ranges, outer: (collapse(low + first), collapse(low + last))}
    return term.with_(ranges=ranges, box=_boxed(term, dim, collapse(first * width), collapse(last * width)))


def _boxed(term: Term, dim: int, start: Lane, stop: Lane) -> tuple[Range, ...]:
    low = term.box[dim][0]
    return (*term.box[:dim], (collapse(low + start), collapse(low + stop)), *term.box[dim + 1 :])


def cut_term(term: Term, dim: int, start: Lane, stop: Lane) -> Term:
    """The part of a term between two positions of a dim, counted from its own start. Not in normal form."""
    low, high = term.box[dim]
    if equal(start, 0) and equal(stop, high - low):
        return term
    box = (*term.box[:dim], (collapse(low + start), collapse(low + stop)), *term.box[dim + 1 :])
    if everywhere(stop <= start):
        return term.with_(coefficient=Fraction(0), box=box)
    group = term.dims[dim]
    if not group:  # the one element is there or not
        return term.with_(weight=collapse(term.weight * np.asarray(stop > start, dtype=np.int64)), box=_one(box, dim))
    ranges = dict(term.ranges)
    for place, variable in enumerate(group):
        inner = 1
        for later in group[place + 1 :]:
            inner *= _even(extent(ranges[later]))
        first = ranges[variable][0]
        if everywhere(start % inner == 0) and everywhere(stop % inner == 0):
            ranges[variable] = (collapse(first + start // inner), collapse(first + stop // inner))
            return term.with_(ranges=ranges, box=box)
        row = collapse(start // inner)
        if not everywhere((stop - 1) // inner == row):
            break
        ranges[variable] = (collapse(first + row), collapse(first + row + 1))
        start, stop = collapse(start - row * inner), collapse(stop - row * inner)
    raise Undescribed("a cut that runs through joined dims")


def _one(box: tuple[Range, ...], dim: int) -> tuple[Range, ...]:
    low = box[dim][0]
    return (*box[:dim], (low, collapse(low + 1)), *box[dim + 1 :])


def _even(size: Lane) -> int:
    if not isinstance(size, int):
        raise Undescribed("joined dims whose sizes differ between lanes")
    return size


def concat(table: Table, values: Sequence[Value], dim: int) -> Value:
    """Tensors side by side along a dim."""
    terms: list[Term] = []
    offset: Lane = 0
    for value in values:
        for term in value.terms:
            terms.append(moved(term, dim, offset))
        offset = collapse(offset + value.shape[dim])
    return Value((*values[0].shape[:dim], offset, *values[0].shape[dim + 1 :]), merged(table, terms))


def moved(term: Term, dim: int, distance: Lane) -> Term:
    low, high = term.box[dim]
    box = (collapse(low + distance), collapse(high + distance))
    return term.with_(box=(*term.box[:dim], box, *term.box[dim + 1 :]))


def taken(table: Table, value: Value, lanes: Lanes) -> Value:
    """What each lane sees when it looks at lane `lanes[l]`: the only way for a value to cross lanes."""

    def span(given: Range) -> Range:
        return take(given[0], lanes), take(given[1], lanes)

    terms = []
    for term in value.terms:
        factors = tuple(f._replace(at=tuple(Index(i.terms, take(i.offset, lanes)) for i in f.at)) for f in term.factors)
        ranges = {variable: span(given) for variable, given in term.ranges.items()}
        there = Term(term.coefficient, factors, ranges, term.dims, tuple(map(span, term.box)), take(term.weight, lanes))
        settled = table.settle(there)
        if settled is not None:
            terms.append(settled)
    return Value(tuple(take(size, lanes) for size in value.shape), merged(table, terms))


def masked(table: Table, value: Value, there: Lanes) -> Value:
    """The value in some lanes, zero in the others."""
    terms = []
    for term in value.terms:
        settled = table.settle(term.with_(weight=collapse(term.weight * there)))
        if settled is not None:
            terms.append(settled)
    return Value(value.shape, tuple(terms))


def same(a: Value, b: Value) -> bool:
    """Whether two tensors are described alike: then they are equal."""
    if len(a.shape) != len(b.shape) or not all(equal(x, y) for x, y in zip(a.shape, b.shape, strict=True)):
        return False
    if any(equal(size, 0) for size in a.shape):
        return True
    if len(a.terms) != len(b.terms):
        return False
    left = list(b.terms)
    for term in a.terms:
        found = next((place for place, other in enumerate(left) if same_term(term, other)), None)
        if found is None:
            return False
        del left[found]
    return True
