"""Tensors as sums of placed monomials: one form for shards, concats, pads, partial sums and what only some ranks hold.

A placed monomial covers a box of the local tensor and counts as zero outside. Boxes are in local positions, which may differ
from lane to lane; the ranges of variables are in global ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product as combinations

import numpy as np

from graphguard.engine.lane import Lane, Lanes, collapse, equal, everywhere, take
from graphguard.engine.merge import merged
from graphguard.engine.monomial import Index, Monomial, Range, Undescribed, extent, mentioned
from graphguard.engine.placed import Placed
from graphguard.engine.product import product
from graphguard.engine.table import Table


@dataclass(frozen=True)
class Value:
    shape: tuple[Lane, ...]
    terms: tuple[Placed, ...]


def whole(monomial: Monomial) -> Value:
    """A tensor that one monomial describes everywhere."""
    shape = tuple(group_extent(monomial, dim) for dim in range(len(monomial.dims)))
    return Value(shape, (Placed(without_single_dims(monomial), tuple((0, size) for size in shape)),))


def group_extent(monomial: Monomial, dim: int) -> Lane:
    size: Lane = 1
    for variable in monomial.dims[dim]:
        size = collapse(size * extent(monomial.ranges[variable]))
    return size


def add(table: Table, values: Sequence[Value]) -> Value:
    terms = [term for value in values for term in value.terms]
    return Value(values[0].shape, merged(table, terms))


def scale(value: Value, factor: Fraction) -> Value:
    terms = tuple(
        replace(term, monomial=replace(term.monomial, coefficient=term.monomial.coefficient * factor)) for term in value.terms
    )
    return Value(value.shape, terms if factor else ())


def cut(value: Value, dim: int, start: Lane, stop: Lane) -> Value:
    """The part of a tensor between two local positions of a dim."""
    terms = []
    for term in value.terms:
        low, high = term.box[dim]
        first, last = _larger(low, start), _smaller(high, stop)
        if not everywhere(last <= first):
            part = narrowed(term.monomial, dim, collapse(first - low), collapse(_larger(last, first) - low))
            box = (collapse(first - start), collapse(_larger(last, first) - start))
            terms.append(Placed(part, (*term.box[:dim], box, *term.box[dim + 1 :])))
    return Value((*value.shape[:dim], collapse(stop - start), *value.shape[dim + 1 :]), tuple(terms))


def concat(table: Table, values: Sequence[Value], dim: int) -> Value:
    """Tensors side by side along a dim."""
    terms: list[Placed] = []
    offset: Lane = 0
    for value in values:
        for term in value.terms:
            low, high = term.box[dim]
            moved = (collapse(low + offset), collapse(high + offset))
            terms.append(replace(term, box=(*term.box[:dim], moved, *term.box[dim + 1 :])))
        offset = collapse(offset + value.shape[dim])
    shape = (*values[0].shape[:dim], offset, *values[0].shape[dim + 1 :])
    return Value(shape, merged(table, terms))


def permute(value: Value, order: Sequence[int]) -> Value:
    terms = tuple(
        Placed(replace(term.monomial, dims=tuple(term.monomial.dims[d] for d in order)), tuple(term.box[d] for d in order))
        for term in value.terms
    )
    return Value(tuple(value.shape[d] for d in order), terms)


def multiply(table: Table, values: Sequence[Value], labels: Sequence[str], result: str, *, file: bool = False) -> Value:
    """As einsum, over all pairs of terms, each restricted to what both cover. `file` is for the sequential run."""
    sizes: dict[str, Lane] = {}
    for value, names in zip(values, labels, strict=True):
        sizes |= zip(names, value.shape, strict=True)
    terms = []
    for chosen in combinations(*(value.terms for value in values)):
        boxes = _common_boxes(chosen, labels)
        if any(everywhere(high <= low) for low, high in boxes.values()):
            continue
        parts = [_restricted(term, names, boxes) for term, names in zip(chosen, labels, strict=True)]
        monomial = product(table, parts, labels, result)
        monomial = table.file(monomial) if file else table.fold(monomial)
        terms.append(Placed(without_single_dims(monomial), tuple(boxes[label] for label in result)))
    return Value(tuple(sizes[label] for label in result), merged(table, terms))


def taken(value: Value, lanes: Lanes) -> Value:
    """What each lane sees when it looks at lane `lanes[l]`: the only way for a value to cross lanes."""

    def span(given: Range) -> Range:
        return take(given[0], lanes), take(given[1], lanes)

    def moved(term: Placed) -> Placed:
        monomial = term.monomial
        factors = tuple(
            factor._replace(at=tuple(Index(index.terms, take(index.offset, lanes)) for index in factor.at))
            for factor in monomial.factors
        )
        ranges = {variable: span(given) for variable, given in monomial.ranges.items()}
        return Placed(replace(monomial, factors=factors, ranges=ranges), tuple(span(given) for given in term.box))

    return Value(tuple(take(size, lanes) for size in value.shape), tuple(moved(term) for term in value.terms))


# ---------------------------------------------------------------------- parts of monomials
def narrowed(monomial: Monomial, dim: int, start: Lane, stop: Lane) -> Monomial:
    """The part of a monomial between two positions of a dim, counted from its own start."""
    if equal(start, 0) and equal(stop, group_extent(monomial, dim)):
        return monomial
    group = monomial.dims[dim]
    if not group:
        raise Undescribed("a dim of size 1 is cut into nothing in some lanes only")
    outer, inner = group[0], 1
    for variable in group[1:]:
        inner *= _uniform(extent(monomial.ranges[variable]))
    if not (everywhere(start % inner == 0) and everywhere(stop % inner == 0)):
        raise Undescribed("a cut runs through a group of joined dims")
    low, _ = monomial.ranges[outer]
    span = (collapse(low + start // inner), collapse(low + stop // inner))
    return without_single_dims(replace(monomial, ranges={**monomial.ranges, outer: span}))


def without_single_dims(monomial: Monomial) -> Monomial:
    """Variables with one element leave the dims. One that nothing mentions is gone altogether."""
    used = mentioned(monomial.factors)
    single = {v for dim in monomial.dims for v in dim if monomial.is_point(v)}
    if not single:
        return monomial
    dims = tuple(tuple(v for v in dim if v not in single) for dim in monomial.dims)
    ranges = {v: span for v, span in monomial.ranges.items() if v not in single or v in used}
    return replace(monomial, ranges=ranges, dims=dims)


def _common_boxes(terms: Sequence[Placed], labels: Sequence[str]) -> dict[str, Range]:
    boxes: dict[str, Range] = {}
    for term, names in zip(terms, labels, strict=True):
        for label, (low, high) in zip(names, term.box, strict=True):
            if label in boxes:
                low, high = _larger(low, boxes[label][0]), _smaller(high, boxes[label][1])
            boxes[label] = low, high
    return boxes


def _restricted(term: Placed, names: str, boxes: dict[str, Range]) -> Monomial:
    monomial = term.monomial
    for dim, label in enumerate(names):
        low, high = boxes[label]
        start = term.box[dim][0]
        monomial = narrowed(monomial, dim, collapse(low - start), collapse(_larger(high, low) - start))
    return monomial


def _uniform(size: Lane) -> int:
    if isinstance(size, np.ndarray):
        raise Undescribed("joined dims of different sizes in different lanes")
    return size


def _larger(a: Lane, b: Lane) -> Lane:
    return collapse(np.maximum(a, b)) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else max(a, b)


def _smaller(a: Lane, b: Lane) -> Lane:
    return collapse(np.minimum(a, b)) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else min(a, b)
