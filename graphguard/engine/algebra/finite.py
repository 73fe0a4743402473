"""Whether the largest of masked scores is a number: in every row some element must be left.

A mask of positions is a step or an impulse, and the log of it is what was added to the scores. So it can be counted, element by
element, whether a row has one that is not minus infinity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from graphguard.engine.algebra.function import instance, members_of
from graphguard.engine.algebra.grid import covers
from graphguard.engine.algebra.infinities import is_log_of_nothing, may_hold_infinity
from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import at_lane
from graphguard.engine.terms.summand_order import kinds_in
from graphguard.engine.terms.term import IMPULSE, STEP, WINDOW, Factor, Index, Term, Value, extent

_Array = np.ndarray[Any, Any]


def may_be_masked(table: Table, value: Value) -> bool:
    return any(may_hold_infinity(table, factor.atom) for term in value.terms for factor in term.factors)


def is_nothing(table: Table, value: Value) -> bool:
    """Whether every element is minus infinity, or that and something finite."""
    members = [member for term in value.terms for member in members_of(table, term)]
    masked = [term for term in members if term.coefficient > 0 and is_log_of_nothing(table, term)]
    rest = [term for term in members if not any(term is other for other in masked)]
    if not any(covers(term.box, value.shape) for term in masked):
        return False
    return not any(may_hold_infinity(table, factor.atom) for term in rest for factor in term.factors)


def some_left(table: Table, value: Value, dims: Sequence[int]) -> bool:
    """Whether, for all positions in the other dims, some element over these dims is not masked. False if it is not known."""
    lanes, _ = kinds_in(value.terms, value.shape)
    shapes = {lane: tuple(at_lane(size, lane) for size in value.shape) for lane in lanes}
    if table.over("masked_elements", sum(int(np.prod(each)) for each in shapes.values())):
        return False
    return all(_left_on(table, value, lane, shape, tuple(dims)) for lane, shape in shapes.items())


def _left_on(table: Table, value: Value, lane: int, shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    left = np.ones(shape, dtype=bool)
    for term in value.terms:
        box = tuple(slice(at_lane(low, lane), at_lane(high, lane)) for low, high in term.box)
        places = _places(term, lane)
        for coefficient, factors in _summands(table, term.coefficient, term.factors):
            if not any(may_hold_infinity(table, factor.atom) for factor in factors):
                continue
            mask = _mask(table, factors, lane, places) if coefficient > 0 and places is not None else None
            if mask is None:
                return False
            left[box] &= mask != 0
    return bool(left.any(axis=dims).all())


def _summands(table: Table, coefficient: Fraction, factors: Sequence[Factor]) -> Iterator[tuple[Fraction, Sequence[Factor]]]:
    """A product, with a named sum written out."""
    if len(factors) == 1 and factors[0].atom.kind == "lin" and factors[0].power == 1:
        axes = {-1 - n: index for n, index in enumerate(factors[0].at)}
        for product in table.definitions[factors[0].atom].operands[0]:
            yield from _summands(table, coefficient * product.label[1], instance(product, axes))  # type: ignore[index]
    else:
        yield coefficient, factors


def _places(term: Term, lane: int) -> dict[int, _Array] | None:
    """The position that each variable stands for at each element of the term's box; None if some are summed."""
    if term.summed:
        return None
    sizes = [tuple(at_lane(extent(term.ranges[v]), lane) for v in group) for group in term.dims]
    places: dict[int, _Array] = {}
    for dim, group in enumerate(term.dims):
        count = [1] * len(term.dims)
        count[dim] = int(np.prod(sizes[dim]))
        for variable, digits in zip(group, np.indices(sizes[dim]), strict=True):
            places[variable] = (digits.reshape(-1) + at_lane(term.ranges[variable][0], lane)).reshape(count)
    return places


def _mask(table: Table, factors: Sequence[Factor], lane: int, places: dict[int, _Array]) -> Any:
    """The mask whose log a product is; None if it is none, or not one of positions."""
    if len(factors) != 1 or factors[0].power != 1:
        return None
    definition = table.definitions.get(factors[0].atom)
    if definition is None or definition.name != "log":
        return None
    if not definition.operands[0]:
        return np.zeros(())
    (product,) = definition.operands[0]
    inside = instance(product, {-1 - n: index for n, index in enumerate(factors[0].at)})
    if product.extents or product.label[1] <= 0:  # type: ignore[index]
        return None
    mask: Any = np.ones(())
    for factor in inside:
        if factor.atom not in (STEP, IMPULSE, WINDOW) or factor.power <= 0:
            return None
        at = _position(factor.at[0], lane, places)
        mask = mask * (at == 0 if factor.atom is IMPULSE else at > 0)
    return mask


def _position(index: Index, lane: int, places: dict[int, _Array]) -> Any:
    at: Any = at_lane(index.offset, lane)
    for variable, stride in index.terms:
        at = at + stride * places[variable]
    return np.asarray(at)
