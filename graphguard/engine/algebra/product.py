"""Products of described tensors over labelled dims: elementwise products, contractions, and all in between.

Dims of one label are laid over each other. Where one side has a dim as several variables and the other as one, the one is
split; where both have one, they become one variable, at a distance if their ranges start at different positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product as combinations
from math import prod

from graphguard.engine.algebra.mask_pieces import split_by_steps
from graphguard.engine.algebra.merge import merged
from graphguard.engine.algebra.value import cut_term, pieces
from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import Lane, collapse, equal, everywhere, larger, smaller, varies
from graphguard.engine.terms.term import (
    ONE,
    CutThroughRows,
    Factor,
    Index,
    Range,
    Term,
    Undescribed,
    Value,
    Variable,
    extent,
    mentioned,
    substitute,
)


def multiply(table: Table, values: Sequence[Value], labels: Sequence[str], result: str) -> Value:
    """As einsum: `multiply(t, [x, w], ["mk", "kn"], "mn")`. Labels that the result does not have are summed."""
    sizes: dict[str, Lane] = {}
    for value, names in zip(values, labels, strict=True):
        for label, size in zip(names, value.shape, strict=True):
            sizes[label] = size
    terms: list[Term] = []
    for chosen in combinations(*(value.terms for value in values)):
        for term in _products(table, chosen, labels, result):
            terms += [term] if table.recording else split_by_steps(table, term)
    return Value(tuple(sizes[label] for label in result), merged(table, terms))


def _products(table: Table, terms: Sequence[Term], labels: Sequence[str], result: str) -> list[Term]:
    """The product; where one term ends within rows of another, the products of their pieces."""
    try:
        found = _product(table, terms, labels, result)
        return [] if found is None else [found]
    except CutThroughRows:
        boxes = _common_boxes(terms, labels)
        parts = [_inside(term, [boxes[label] for label in names]) for term, names in zip(terms, labels, strict=True)]
        if table.over("crossings", prod(map(len, parts))):
            raise
        return [each for chosen in combinations(*parts) for each in _products(table, chosen, labels, result)]


def _inside(term: Term, box: Sequence[Range]) -> list[Term]:
    """The pieces of a term that lie in a box."""
    found = [term]
    for dim, (low, high) in enumerate(box):
        cut = []
        for part in found:
            first, last = part.box[dim]
            start, stop = larger(first, low), smaller(last, high)
            cut += pieces(part, dim, collapse(start - first), collapse(larger(start, stop) - first))
        found = [part for part in cut if part.coefficient]
    return found


def _product(table: Table, terms: Sequence[Term], labels: Sequence[str], result: str) -> Term | None:
    boxes = _common_boxes(terms, labels)
    if any(everywhere(high <= low) for low, high in boxes.values()):
        return None
    layout = Layout(table)
    coefficient = Fraction(1)
    weight: Lane = 1
    ragged = any(varies(extent(span)) for span in boxes.values())
    for whole, names in zip(terms, labels, strict=True):
        term = whole
        for dim, label in enumerate(names):
            low, high = boxes[label]
            start = term.box[dim][0]
            term = cut_term(term, dim, collapse(low - start), collapse(high - start))
        if ragged:  # lanes where nothing is left look like the others, and do not count
            settled = table.settle(term)
            if settled is None:
                return None
            term = settled
        coefficient, weight = coefficient * term.coefficient, collapse(weight * term.weight)
        layout.lay(term, names)
    dims = tuple(tuple(layout.groups.get(label, ())) for label in result)
    box = tuple(boxes[label] for label in result)
    return table.settle(Term(coefficient, tuple(layout.factors()), layout.ranges, dims, box, weight))


def _common_boxes(terms: Sequence[Term], labels: Sequence[str]) -> dict[str, Range]:
    boxes: dict[str, Range] = {}
    for term, names in zip(terms, labels, strict=True):
        for label, (low, high) in zip(names, term.box, strict=True):
            if label in boxes:
                low, high = larger(low, boxes[label][0]), smaller(high, boxes[label][1])
            boxes[label] = low, high
    return boxes


class Layout:
    """Terms over shared variables, while their dims are laid over each other. `parts` are the factors of each."""

    def __init__(self, table: Table):
        self._names = table.names
        self.parts: list[tuple[Factor, ...]] = []
        self.ranges: dict[Variable, Range] = {}
        self.groups: dict[str, list[Variable]] = {}

    def factors(self) -> list[Factor]:
        return [factor for part in self.parts for factor in part]

    def lay(self, term: Term, labels: str) -> None:
        factors, ranges, dims = term.factors, term.ranges, term.dims
        if self.ranges:  # two uses of one description do not share their variables
            new = {v: next(self._names) for v in ranges}
            factors = substitute(factors, {old: Index(((v, 1),)) for old, v in new.items()})
            ranges = {new[v]: span for v, span in ranges.items()}
            dims = tuple(tuple(new[v] for v in dim) for dim in dims)
        self.parts.append(factors)
        self.ranges |= ranges
        for label, dim in zip(labels, dims, strict=True):
            group = [v for v in dim if not equal(extent(self.ranges[v]), 1)]  # one element is summed over, which is itself
            known = self.groups.get(label)
            self.groups[label] = group if known is None else self._joined(known, group)

    def replace(self, variable: Variable, position: Index) -> None:
        self._substitute({variable: position})

    def _substitute(self, replacements: dict[Variable, Index]) -> None:
        self.parts = [substitute(part, replacements) for part in self.parts]

    def _joined(self, mine: list[Variable], its: list[Variable]) -> list[Variable]:
        """One group of variables for both, from the outermost inwards."""
        mine, its, joined = list(mine), list(its), []
        while mine and its:
            a, b = extent(self.ranges[mine[0]]), extent(self.ranges[its[0]])
            if equal(a, b):
                joined.append(self._identify(mine.pop(0), its.pop(0)))
            elif everywhere(a > b):
                mine[:1] = self.split(mine[0], b)
            elif everywhere(b > a):
                its[:1] = self.split(its[0], a)
            else:
                raise Undescribed("shards of different sizes are laid over each other")
        if mine or its:
            raise Undescribed("dims of different sizes are laid over each other")
        return joined

    def _identify(self, a: Variable, b: Variable) -> Variable:
        """Make two variables of equal extent one. One that nothing mentions has no position of its own and gives way."""
        used = mentioned(self.factors())
        if a not in used:
            a, b = b, a
        distance: Lane = collapse(self.ranges[b][0] - self.ranges[a][0]) if b in used else 0
        self._substitute({b: Index(((a, 1),), distance)})
        del self.ranges[b]
        return a

    def split(self, variable: Variable, outer: Lane) -> list[Variable]:
        """A variable as two, the outer one with the given extent. Aligned ranges keep their global positions."""
        low, high = self.ranges[variable]
        size = collapse(high - low)
        if not isinstance(outer, int) or not isinstance(size, int) or size % outer:
            raise Undescribed(f"a range of {size} does not split into {outer} equal parts")
        del self.ranges[variable]
        inner = int(size // outer)
        first, second = next(self._names), next(self._names)
        aligned = everywhere(low % inner == 0)
        start = collapse(low // inner) if aligned else 0
        self.ranges[first], self.ranges[second] = (start, collapse(start + outer)), (0, inner)
        self._substitute({variable: Index(((first, inner), (second, 1)), 0 if aligned else low)})
        return [first, second]


def filled(table: Table, box: Sequence[Range], number: Fraction = ONE, weight: Lane = 1) -> Term:
    """A term that is one number on a box."""
    ranges: dict[Variable, Range] = {}
    dims: list[tuple[Variable, ...]] = []
    for span in box:
        size = extent(span)
        if equal(size, 1):
            dims.append(())
        else:
            variable = next(table.names)
            ranges[variable] = (0, size)
            dims.append((variable,))
    return Term(number, (), ranges, tuple(dims), tuple(box), weight)


def constant(shape: Sequence[Lane], number: Fraction, table: Table, weight: Lane = 1) -> Value:
    """A tensor filled with one number, or one per lane."""
    if not number or any(equal(size, 0) for size in shape):
        return Value(tuple(shape), ())
    term = table.settle(filled(table, [(0, size) for size in shape], number, weight))
    return Value(tuple(shape), () if term is None else (term,))
