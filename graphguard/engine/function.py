"""Elementwise functions of described tensors. A function of sums of monomials is an atom over the variables that they share."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from itertools import product as combinations
from typing import NamedTuple

from graphguard.engine.lane import Lane, equal, everywhere, key, varies
from graphguard.engine.merge import merged
from graphguard.engine.monomial import (
    Atom,
    Factor,
    Monomial,
    Part,
    Range,
    Undescribed,
    Variable,
    canonical_together,
    mentioned,
    variable_index,
)
from graphguard.engine.placed import Placed
from graphguard.engine.product import Layout
from graphguard.engine.table import Table
from graphguard.engine.value import Value, cut, without_single_dims

Operand = tuple[tuple[Fraction, tuple[Factor, ...], tuple[tuple[Variable, Range], ...]], ...]


class Function(NamedTuple):
    """The definition of an atom: each operand is a sum of (coefficient, factors, summed ranges), over the free variables."""

    name: str
    parameters: tuple[Hashable, ...]
    operands: tuple[Operand, ...]
    free: tuple[Variable, ...]


def apply(table: Table, name: str, values: Sequence[Value], parameters: tuple[Hashable, ...] = ()) -> Value:
    """`name` of tensors of one shape, element by element. Where pieces are placed side by side, piece by piece."""
    shape = values[0].shape
    if any(len(value.shape) != len(shape) or not all(map(equal, value.shape, shape)) for value in values):
        raise Undescribed("an elementwise function of tensors of different shapes")
    terms = []
    for cell in _cells(values):
        terms.append(Placed(_on_cell(table, name, [_part(value, cell) for value in values], parameters), cell))
    return Value(shape, merged(table, terms))


def _cells(values: Sequence[Value]) -> Iterator[tuple[Range, ...]]:
    """The coarsest grid on which each term covers a cell whole or not at all."""
    cuts = []
    for dim, size in enumerate(values[0].shape):
        bounds: dict[object, Lane] = {key(0): 0, key(size): size}
        for value in values:
            for term in value.terms:
                bounds |= {key(bound): bound for bound in term.box[dim]}
        cuts.append(_in_order(list(bounds.values())))
    yield from combinations(*(list(pairwise(bounds)) for bounds in cuts))


def _in_order(bounds: list[Lane]) -> list[Lane]:
    ordered: list[Lane] = []
    for bound in bounds:
        place = sum(1 for other in ordered if everywhere(other <= bound))
        if not all(everywhere(bound <= other) for other in ordered[place:]):
            raise Undescribed("pieces that lie in a different order in different lanes")
        ordered.insert(place, bound)
    return ordered


def _part(value: Value, cell: tuple[Range, ...]) -> Value:
    for dim, (low, high) in enumerate(cell):
        value = cut(value, dim, low, high)
    return value


def _on_cell(table: Table, name: str, values: Sequence[Value], parameters: tuple[Hashable, ...]) -> Monomial:
    """The function where every term covers all of every operand."""
    labels = "".join(chr(97 + dim) for dim in range(len(values[0].shape)))
    layout = Layout(table)
    for value in values:
        for term in value.terms:
            layout.lay(term.monomial, labels)
    dims = tuple(tuple(layout.groups.get(label, ())) for label in labels)
    layout.join_points(dims)
    visible = {variable for dim in dims for variable in dim}
    summed = {v for v in layout.ranges if v not in visible and not _is_point(layout.ranges[v])}
    if summed - mentioned(layout.factors()):
        raise Undescribed(f"{name} of a sum over a repeated dim")
    if any(varies(bound) for v in summed for bound in layout.ranges[v]):
        raise Undescribed(f"{name} of a partial sum")
    factors = iter(layout.parts)
    operands = [
        [_labelled(owner, term.monomial.coefficient, next(factors), summed) for term in value.terms]
        for owner, value in enumerate(values)
    ]
    if any(varies(index.offset) for factor in layout.factors() for index in factor.at):
        raise Undescribed(f"{name} of tensors whose shards lie at different distances in different lanes")
    atom, free = _atom(table, name, parameters, operands, layout.ranges)
    ranges = {v: span for v, span in layout.ranges.items() if v not in summed}
    described = Factor(atom, tuple(variable_index(v) for v in free))
    return without_single_dims(Monomial(Fraction(1), (described,), ranges, dims))


def _labelled(owner: int, coefficient: Fraction, factors: tuple[Factor, ...], summed: set[Variable]) -> tuple[Fraction, Part]:
    return coefficient, ((owner, coefficient), factors, tuple(v for v in sorted(summed) if v in mentioned(factors)))


def _atom(
    table: Table,
    name: str,
    parameters: tuple[Hashable, ...],
    operands: Sequence[Sequence[tuple[Fraction, Part]]],
    ranges: Mapping[Variable, Range],
) -> tuple[Atom, tuple[Variable, ...]]:
    """The atom of a function, and the variables that are its axes."""
    parts = [part for operand in operands for _, part in operand]
    form = canonical_together(parts, ranges)
    summed = {v for part in parts for v in part[2]}
    free = tuple(v for v in form.order if v not in summed)
    atom = table.atom("function", (name, parameters, len(operands), form.key))
    if atom.id not in table.functions:
        definition = tuple(
            tuple((coefficient, factors, tuple((v, ranges[v]) for v in sums)) for coefficient, (_, factors, sums) in operand)
            for operand in operands
        )
        table.functions[atom.id] = Function(name, parameters, definition, free)
    return atom, free


def _is_point(span: Range) -> bool:
    return equal(span[1] - span[0], 1)
