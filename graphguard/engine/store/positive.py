"""Whether a factor is above zero wherever a term reads it.

What is known of an atom holds for all positions. A row of weights behind a causal mask is above zero only where the mask leaves
some of the row: that is a fact of the positions at which the sum is read, which can be counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphguard.engine.store.journal import asked
from graphguard.engine.store.records import Records
from graphguard.engine.terms.lane import Lane, at_lane, kinds
from graphguard.engine.terms.term import IMPULSE, STEP, WINDOW, Atom, Factor, Index, Range, Variable

_Array = np.ndarray[Any, Any]
_NOT_KNOWN = np.zeros((), dtype=bool)
_KNOWN = np.ones((), dtype=bool)


class _TooMany(Exception):
    pass


def is_not_zero(table: Records, factor: Factor, ranges: Mapping[Variable, Range], weight: Lane) -> bool:
    """Whether an atom is not zero where a factor reads it. What the sequential program divides by, at that one position, is
    not where that program is defined."""
    if any(index.terms for index in factor.at):
        return is_positive(table, factor, ranges, weight)
    return table.facts.holds("nonzero", factor, ranges) or is_positive(table, factor, ranges, weight)


def is_positive(table: Records, factor: Factor, ranges: Mapping[Variable, Range], weight: Lane = 1) -> bool:
    """Whether an atom is above zero at all positions of a factor, in all lanes that have a share. False if it is not known."""
    if factor.atom.positive:
        return True
    if factor.atom.kind not in ("sum", "lin") or not factor.atom.nonnegative:
        return False
    return is_positive_there(table, factor, ranges, weight)


@asked
def is_positive_there(table: Records, factor: Factor, ranges: Mapping[Variable, Range], weight: Lane) -> bool:
    """As above, of any atom, counted at its positions."""
    mentioned = sorted(set(factor.variables()))
    held = [weight, *(index.offset for index in factor.at), *(bound for v in mentioned for bound in ranges[v])]
    lanes, _ = kinds(held)
    try:
        return all(_at_lane(table, factor, ranges, mentioned, n) for n in lanes if at_lane(weight, n))
    except _TooMany:
        return False


def _at_lane(
    table: Records, factor: Factor, ranges: Mapping[Variable, Range], variables: Sequence[Variable], lane: int
) -> bool:
    places: dict[Variable, _Array] = {}
    for number, variable in enumerate(variables):
        shape = [1] * len(variables)
        shape[number] = -1
        low, high = (at_lane(bound, lane) for bound in ranges[variable])
        places[variable] = np.arange(low, high).reshape(shape)
    return bool(_positive(table, factor.atom, [_position(index, places, lane) for index in factor.at]).all())


def _position(index: Index, places: Mapping[Variable, _Array], lane: int = 0) -> _Array:
    at: Any = at_lane(index.offset, lane)
    for variable, stride in index.terms:
        at = at + stride * places[variable]
    return np.asarray(at)


def _positive(table: Records, atom: Atom, at: Sequence[_Array]) -> _Array:
    """At which of some positions an atom is known to be above zero."""
    if atom.positive:
        return _KNOWN
    if atom in (STEP, WINDOW):
        return np.asarray(at[0] > 0)
    if atom is IMPULSE:
        return np.asarray(at[0] == 0)
    if atom.kind not in ("sum", "lin") or not atom.nonnegative:
        return _NOT_KNOWN
    found = _NOT_KNOWN
    for _, factors, extents in table.definitions[atom].operands[0]:
        places = {-1 - n: each.reshape((*each.shape, *[1] * len(extents))) for n, each in enumerate(at)}
        for n, size in enumerate(extents):
            places[n] = np.arange(size).reshape((-1, *[1] * (len(extents) - n - 1)))
        found = found | _product(table, factors, places, len(extents))
    return found


def _product(table: Records, factors: Sequence[Factor], places: Mapping[Variable, _Array], bound: int) -> _Array:
    """Where all factors are above zero for some elements of the bound variables, which are the last axes."""
    inside = _KNOWN
    for factor in factors:
        if factor.atom.positive:
            continue
        positions = [_position(index, places) for index in factor.at]
        elements = math.prod(np.broadcast_shapes(inside.shape, *(each.shape for each in positions)))
        if table.over("positive_elements", elements):
            raise _TooMany
        inside = inside & _positive(table, factor.atom, positions)
    last = tuple(range(max(inside.ndim - bound, 0), inside.ndim))
    return np.asarray(inside.any(axis=last)) if last else inside
