"""What does not multiply: sums, cuts, concats, permutations, changes of shape, and reading other lanes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise, permutations

import numpy as np

from graphguard.engine.algebra.alike import same_span, same_term, unstepped
from graphguard.engine.algebra.merge import merged
from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import Lane, Lanes, collapse, equal, everywhere, larger, smaller, take
from graphguard.engine.terms.term import CutThroughRows, Index, Range, Term, Undescribed, Value, Variable, extent

__all__ = ["add", "concat", "cut", "joined_inside", "permute", "pieces", "same", "scale", "taken"]


def add(table: Table, values: Sequence[Value]) -> Value:
    terms = [term for value in values for term in value.terms]
    return joined_inside(table, Value(values[0].shape, merged(table, terms)))


def joined_inside(table: Table, value: Value) -> Value:
    """The value with terms that cover more than others which they go on from cut at the edges of those, where each cut term
    then is part of a larger one: a sum over some elements everywhere, and over further ones, not as many, in each part."""
    if len(value.terms) < 2:
        return value
    for wide, narrow in permutations(value.terms, 2):
        dim = _dim_inside(wide, narrow)
        if dim is None:
            continue
        rest = [term for term in value.terms if term is not wide]
        try:
            parted = merged(table, [*rest, *_cut_at(table, wide, dim, narrow.box[dim])])
        except Undescribed:  # it stays as it is
            continue
        if len(parted) < len(value.terms):
            return joined_inside(table, Value(value.shape, parted))
    return value


def _dim_inside(wide: Term, narrow: Term) -> int | None:
    """The one dim in which a term covers less than another one that is like it, but for steps."""
    if wide.coefficient != narrow.coefficient or unstepped(wide) != unstepped(narrow):
        return None
    apart = [dim for dim, (a, b) in enumerate(zip(wide.box, narrow.box, strict=True)) if not same_span(a, b)]
    if len(apart) != 1:
        return None
    (low, high), (start, stop) = wide.box[apart[0]], narrow.box[apart[0]]
    return apart[0] if everywhere(low <= start) and everywhere(stop <= high) else None


def _cut_at(table: Table, term: Term, dim: int, span: Range) -> list[Term]:
    low, high = term.box[dim]
    edges = [0, collapse(span[0] - low), collapse(span[1] - low), collapse(high - low)]
    parts = [part for start, stop in pairwise(edges) for part in pieces(term, dim, start, stop)]
    return [settled for settled in map(table.settle, parts) if settled is not None]


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
        for part in pieces(term, dim, collapse(first - low), collapse(last - low)):
            settled = table.settle(moved(part, dim, collapse(-start)))
            if settled is not None:
                terms.append(settled)
    return Value(shape, merged(table, terms))


def pieces(term: Term, dim: int, start: Lane, stop: Lane) -> list[Term]:
    """The part of a term between two positions of a dim: several terms where it begins and ends within rows of joined dims."""
    try:
        return [cut_term(term, dim, start, stop)]
    except CutThroughRows:
        return list(_runs(term, dim, 0, start, stop, 0))


def _runs(term: Term, dim: int, place: int, start: Lane, stop: Lane, before: Lane) -> Iterator[Term]:
    """A run of the elements that the variables of a dim from `place` on count, of which `before` elements of the term come
    first: what lies in the row where it begins, whole rows, what lies in the row where it ends. A part is empty in some lanes
    and not in others; one that is empty in all is left out."""
    if everywhere(stop <= start):
        return
    group = term.dims[dim]
    variable = group[place]
    width = 1
    for later in group[place + 1 :]:
        width *= _even(extent(term.ranges[later]))
    low = term.ranges[variable][0]

    def rows(first: Lane, last: Lane) -> dict[Variable, Range]:
        return {**term.ranges, variable: (collapse(low + first), collapse(low + last))}

    def within(start: Lane, stop: Lane) -> Iterator[Term]:
        row = collapse(start // width)
        there, skipped = term.with_(ranges=rows(row, row + 1)), collapse(row * width)
        yield from _runs(there, dim, place + 1, collapse(start - skipped), collapse(stop - skipped), collapse(before + skipped))

    first, last = collapse(-(-start // width)), collapse(stop // width)
    head = smaller(collapse(first * width), stop)
    tail = larger(collapse(last * width), head)
    yield from within(start, head)
    if not everywhere(last <= first):
        last = larger(last, first)
        span = (collapse(before + first * width), collapse(before + last * width))
        yield term.with_(ranges=rows(first, last), box=_boxed(term, dim, *span))
    yield from within(tail, stop)


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
    raise CutThroughRows("a cut that runs through joined dims")


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
