"""The grid that the boxes of terms cut a tensor into, and work done cell by cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from itertools import product as combinations

import numpy as np

from graphguard.engine.algebra.merge import merged
from graphguard.engine.algebra.value import cut_term, pieces
from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import Lane, collapse, equal, everywhere
from graphguard.engine.terms.term import CutThroughRows, Range, Term, Undescribed, Value, extent

Box = tuple[Range, ...]
Work = Callable[[list[list[Term]], Box], Term | None]


def by_cell(table: Table, values: Sequence[Value], work: Work) -> Value:
    """A tensor made cell by cell from what each operand has there. All operands have the same shape."""
    shape = values[0].shape
    if any(equal(size, 0) for size in shape):
        return Value(shape, ())
    if all(covers(term.box, shape) for value in values for term in value.terms):
        term = work([list(value.terms) for value in values], tuple((0, size) for size in shape))
        return Value(shape, () if term is None else (term,))
    terms = []
    values = _cuttable(table, values)
    for cell in _cells(table, values):
        inside = [list(merged(table, [unmasked(t, cell) for t in _inside(table, value.terms, cell)])) for value in values]
        term = work(inside, cell)
        settled = None if term is None else table.settle(term)
        if settled is not None:
            terms.append(settled)
    return Value(shape, tuple(terms))


def piecewise(table: Table, value: Value, work: Callable[[Value], Value]) -> Value:
    """What is made of each cell as a tensor of its own, put together."""
    if all(covers(term.box, value.shape) for term in value.terms):
        return work(value)
    terms: list[Term] = []
    for cell, inside in in_cells(table, value):
        shape = tuple(extent(span) for span in cell)
        home = tuple((0, size) for size in shape)
        piece = merged(table, [unmasked(term, cell).with_(box=home) for term in inside])
        terms += [_moved(term, cell) for term in work(Value(shape, piece)).terms]
    return Value(value.shape, tuple(terms))


def _moved(term: Term, cell: Box) -> Term:
    box = ((collapse(low + start), collapse(high + start)) for (low, high), (start, _) in zip(term.box, cell, strict=True))
    return term.with_(box=tuple(box))


def in_cells(table: Table, value: Value) -> Iterator[tuple[Box, list[Term]]]:
    """The terms of a tensor, cut at the edges of all of them, cell by cell."""
    (value,) = _cuttable(table, [value])
    for cell in _cells(table, [value]):
        yield cell, list(_inside(table, value.terms, cell))


def covers(box: tuple[Range, ...], shape: tuple[Lane, ...]) -> bool:
    return all(equal(low, 0) and equal(high, size) for (low, high), size in zip(box, shape, strict=True))


def _inside(table: Table, terms: Sequence[Term], cell: tuple[Range, ...]) -> Iterator[Term]:
    for term in terms:
        if all(everywhere(b[0] <= c[0]) and everywhere(c[1] <= b[1]) for b, c in zip(term.box, cell, strict=True)):
            for dim, (low, high) in enumerate(cell):
                start = term.box[dim][0]
                term = cut_term(term, dim, collapse(low - start), collapse(high - start))
            settled = table.settle(term)
            if settled is not None:
                yield settled


def unmasked(term: Term, cell: Box) -> Term:
    """The term without the zeros that it has where the cell is empty: there, the box says that it does not count."""
    if not isinstance(term.weight, np.ndarray):
        return term
    there = np.ones(term.weight.shape, dtype=bool)
    for low, high in cell:
        there = there & np.asarray(high > low)
    if there.all() or not there.any():
        return term
    weight = collapse(np.where(there, term.weight, term.weight[int(np.flatnonzero(there)[0])]))
    return term.with_(weight=weight, box=cell)


def _cuttable(table: Table, values: Sequence[Value]) -> list[Value]:
    """The same tensors; a term that an edge of another one cuts within rows of joined dims is in pieces, whose edges count,
    too."""
    found = list(values)
    for dim in range(len(values[0].shape)):
        while any(len(term.dims[dim]) > 1 for value in found for term in value.terms):
            bounds = _edges(found, dim)
            parted = [Value(value.shape, tuple(p for t in value.terms for p in _parted(t, dim, bounds))) for value in found]
            count = sum(len(value.terms) for value in parted)
            if count == sum(len(value.terms) for value in found):
                break
            if table.over("crossings", count):
                raise Undescribed("a cut that runs through joined dims")
            found = parted
    return found


def _parted(term: Term, dim: int, bounds: Sequence[Lane]) -> list[Term]:
    low, high = term.box[dim]
    if len(term.dims[dim]) < 2:
        return [term]
    inside = [collapse(bound - low) for bound in bounds if everywhere(low <= bound) and everywhere(bound <= high)]
    try:
        for span in pairwise(inside):
            cut_term(term, dim, *span)
        return [term]
    except CutThroughRows:
        return [part for span in pairwise(inside) for part in pieces(term, dim, *span) if part.coefficient]


def _edges(values: Sequence[Value], dim: int) -> list[Lane]:
    bounds: list[Lane] = [0, values[0].shape[dim]]
    for value in values:
        for term in value.terms:
            for bound in term.box[dim]:
                _insert(bounds, bound)
    return bounds


def _cells(table: Table, values: Sequence[Value]) -> Iterator[tuple[Range, ...]]:
    edges = [list(pairwise(_edges(values, dim))) for dim in range(len(values[0].shape))]
    count = 1
    for spans in edges:
        count *= len(spans)
    if table.over("cells", count):
        raise Undescribed(f"a tensor in {count} pieces")
    yield from combinations(*edges)


def _insert(bounds: list[Lane], bound: Lane) -> None:
    if any(equal(bound, known) for known in bounds):
        return
    place = next((n for n, known in enumerate(bounds) if everywhere(bound <= known)), None)
    if place is None or not everywhere(bound >= bounds[place - 1]):
        raise Undescribed("pieces that lie in a different order in different lanes")
    bounds.insert(place, bound)
