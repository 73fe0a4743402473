"""Descriptions at single elements, in made-up numbers: a quick look before a long comparison.

Every atom that is not a sum holds a number that is drawn from its name and position. Two sums whose elements are different
numbers then are not equal when they are written out, and need not be. It can only save work: what agrees is still compared.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import at_lane
from graphguard.engine.terms.summand_order import lanes_in
from graphguard.engine.terms.term import DIMS, IDX, IMPULSE, STEP, WINDOW, Atom, Factor, Index, Term, Value, Variable

Array = np.ndarray[Any, Any]
MOST_ELEMENTS = 1 << 14
MOST_AXES = 30  # numpy has no more than 32
PLACES = (0.0, 0.61803, 1.0)  # of the elements that are looked at, as parts of each dim
TOLERANCE = 1e-7
_MIX = np.uint64(0x9E3779B97F4A7C15)


class _NotKnown(Exception):
    """A number that would take long, or that other numbers say something about."""


@dataclass
class _Look:
    """What was found so far: sums are made of each other, so that there are very many ways down to one of them."""

    table: Table
    sums: dict[Hashable, Array] = field(default_factory=dict)  # by atom and positions


def may_be_equal(table: Table, a: Value, b: Value) -> bool:
    """Whether two descriptions agree at some elements of the first and the last lane."""
    table.journal.spoil()  # what agrees in made-up numbers of these atoms need not do so in those of others
    lanes, look = (lanes_in((*a.terms, *b.terms)) or 1) - 1, _Look(table)
    try:
        for lane in {0, lanes}:
            for element in _elements(a, lane):
                left, right = ([_term_at(look, term, element, lane) for term in value.terms] for value in (a, b))
                size = 1 + sum(map(abs, (*left, *right)))  # what is left of large terms that cancel is rounding
                if abs(sum(left) - sum(right)) > TOLERANCE * size:
                    return False
    except _NotKnown:
        return True
    return True


def _elements(value: Value, lane: int) -> Iterator[tuple[int, ...]]:
    sizes = [at_lane(size, lane) for size in value.shape]
    if all(sizes):
        yield from {tuple(round(place * (size - 1)) for size in sizes) for place in PLACES}


def _term_at(look: _Look, term: Term, element: Sequence[int], lane: int) -> float:
    """A term at a local element; outside of its box it is zero."""
    weight = at_lane(term.weight, lane)
    places: dict[Variable, Array] = {}
    for group, at, (low, high) in zip(term.dims, element, term.box, strict=True):
        if not at_lane(low, lane) <= at < at_lane(high, lane) or not weight:
            return 0.0
        left = at - at_lane(low, lane)
        for variable in reversed(group):
            first, last = (at_lane(bound, lane) for bound in term.ranges[variable])
            left, digit = divmod(left, max(1, last - first))
            places[variable] = np.asarray(first + digit)
    summed = [(v, np.arange(*(at_lane(bound, lane) for bound in term.ranges[v]))) for v in term.summed]
    _spread(places, summed)
    total = _summed(_product(look, term.factors, places, lane), [len(each) for _, each in summed])
    return float(term.coefficient) * weight * float(total)


def _spread(places: dict[Variable, Array], bound: Sequence[tuple[Variable, Array]]) -> None:
    """Gives each bound variable an axis of its own, behind those of the others."""
    for variable, at in places.items():
        places[variable] = at.reshape((*at.shape, *[1] * len(bound)))
    for number, (variable, at) in enumerate(bound):
        places[variable] = at.reshape((-1, *[1] * (len(bound) - number - 1)))


def _summed(elements: Array, sizes: Sequence[int]) -> Array:
    """The sum over the last axes, along some of which nothing may be said."""
    if not sizes:
        return elements
    last = elements.shape[-len(sizes) :]
    repeated = math.prod(size for size, have in zip(sizes, last, strict=True) if have != size)
    return np.asarray(elements.sum(axis=tuple(range(-len(sizes), 0))) * repeated)


def _product(look: _Look, factors: Sequence[Factor], places: Mapping[Variable, Array], lane: int) -> Array:
    total: Array = np.ones((1,) * max((each.ndim for each in places.values()), default=0))
    for factor in factors:
        _require_few([total, *(places[variable] for variable in factor.variables())])
        number = _atom(look, factor.atom, [_position(index, places, lane) for index in factor.at])
        with np.errstate(all="ignore"):
            total = total * (number if factor.power == 1 else np.power(number, float(factor.power)))
    if not np.isfinite(total).all():
        raise _NotKnown
    return total


def _require_few(arrays: Sequence[Array]) -> None:
    """Before they are combined, as what comes of it could not be held."""
    axes = max(each.ndim for each in arrays)
    sizes = [max(each.shape[-axis] for each in arrays if each.ndim >= axis) for axis in range(1, axes + 1)]
    if axes > MOST_AXES or math.prod(sizes) > MOST_ELEMENTS:
        raise _NotKnown


def _position(index: Index, places: Mapping[Variable, Array], lane: int) -> Array:
    at: Any = at_lane(index.offset, lane)
    for variable, stride in index.terms:
        at = at + stride * places[variable]
    return np.asarray(at)


def _atom(look: _Look, atom: Atom, at: Sequence[Array]) -> Array:
    if atom in (STEP, WINDOW):
        return np.asarray(at[0] > 0, dtype=float)
    if atom is IMPULSE:
        return np.asarray(at[0] == 0, dtype=float)
    if atom is IDX:
        return np.asarray(at[0], dtype=float)
    if atom is DIMS:
        return np.ones(())
    if atom.kind in ("sum", "lin"):
        return _sum_atom(look, atom, at)
    if atom.kind in ("delta", "part", "number"):
        raise _NotKnown  # the sum over all of them is 1, or an input; roots of numbers are numbers
    drawn = _drawn(atom.id, at)
    return np.asarray(drawn > 1, dtype=float) if atom.indicator else drawn


def _sum_atom(look: _Look, atom: Atom, at: Sequence[Array]) -> Array:
    key = atom.id, tuple([(each.shape, each.tobytes()) for each in at])
    known = look.sums.get(key)
    if known is None:
        total: Any = 0.0
        for label, factors, extents in look.table.definitions[atom].operands[0]:
            places = {-1 - n: each for n, each in enumerate(at)}
            _spread(places, [(n, np.arange(size)) for n, size in enumerate(extents)])
            total = total + float(label[1]) * _summed(_product(look, factors, places, 0), extents)  # type: ignore[index]
        known = look.sums[key] = np.asarray(total)
    return known


def _drawn(name: int, at: Sequence[Array]) -> Array:
    """A number between 0.5 and 1.5 for each position."""
    mixed: Any = np.asarray(name + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for each in (0, *at):
            mixed = (mixed ^ np.asarray(each).astype(np.int64).astype(np.uint64)) * _MIX
            mixed = mixed ^ (mixed >> np.uint64(29))
    return np.asarray(0.5 + (mixed >> np.uint64(11)).astype(float) / 2.0**53)
