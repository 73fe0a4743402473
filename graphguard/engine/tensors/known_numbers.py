"""Tensors of which every element is known: positions, masks of positions, and constants made of those. What sorts or searches
them is computed, not described."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from graphguard.engine.tensors.ops import Ops
from graphguard.engine.terms.lane import Lane, at_lane, collapse
from graphguard.engine.terms.summand_order import lanes_in
from graphguard.engine.terms.term import IDX, IMPULSE, STEP, WINDOW, Index, Term, Undescribed, Value

Array = np.ndarray[Any, np.dtype[np.int64]]
_MEANING: dict[Any, Callable[[Array], Array]] = {
    IDX: lambda p: p,
    IMPULSE: lambda p: (p == 0).astype(np.int64),
    STEP: lambda p: (p > 0).astype(np.int64),
    WINDOW: lambda p: (p > 0).astype(np.int64),
}


def numbers_of(ops: Ops, values: Sequence[Value]) -> list[list[Array]] | None:
    """The elements of each tensor, lane by lane, if all are known whole numbers; one lane stands for all that are alike."""
    terms = [term for value in values for term in value.terms]
    if any(factor.atom not in _MEANING or factor.power != 1 for term in terms for factor in term.factors):
        return None
    if any(not isinstance(size, int) for value in values for size in value.shape):
        return None
    lanes = range(lanes_in(terms) or 1)
    found = [[_elements(ops, value, lane) for lane in lanes] for value in values]
    if any(each is None for value in found for each in value):
        return None
    return [[each for each in value if each is not None] for value in found]


def _elements(ops: Ops, value: Value, lane: int) -> Array | None:
    shape = tuple(int(size) for size in value.shape)
    if ops.table.over("numbers", math.prod(shape)):
        return None
    total = np.zeros(shape, dtype=object)
    for term in value.terms:
        if not at_lane(term.weight, lane):
            continue
        part = _on_box(ops, term, lane)
        if part is None:
            return None
        box = tuple(slice(at_lane(low, lane), at_lane(high, lane)) for low, high in term.box)
        total[box] = total[box] + part
    if any(Fraction(each).denominator != 1 for each in total.flat):
        return None
    return np.asarray(total, dtype=np.int64)


def _on_box(ops: Ops, term: Term, lane: int) -> Any:
    """What a term has on its box: a grid of its variables, those of dims first, the others summed."""
    order = [v for dim in term.dims for v in dim] + term.summed
    spans = [tuple(at_lane(bound, lane) for bound in term.ranges[v]) for v in order]
    sizes = [high - low for low, high in spans]
    if min(sizes, default=1) < 1 or ops.table.over("numbers", math.isqrt(math.prod(sizes) - 1) + 1):
        return None
    grid = {v: np.arange(*span).reshape([-1 if d == place else 1 for d in range(len(order))])
            for place, (v, span) in enumerate(zip(order, spans, strict=True))}  # fmt: skip
    product: Any = np.ones(sizes, dtype=np.int64)
    for factor in term.factors:
        product = product * _MEANING[factor.atom](_position(factor.at[0], grid, lane))
    product = product.sum(tuple(range(len(order) - len(term.summed), len(order))))
    shape = [at_lane(high, lane) - at_lane(low, lane) for low, high in term.box]
    return product.reshape(shape).astype(object) * (term.coefficient * at_lane(term.weight, lane))


def _position(index: Index, grid: dict[int, Array], lane: int) -> Array:
    found = np.asarray(at_lane(index.offset, lane), dtype=np.int64)
    for variable, stride in index.terms:
        found = found + stride * grid[variable]
    return found


def row_of(ops: Ops, lanes: Sequence[Any]) -> Value:
    """A tensor of one dim with these elements, as runs of neighbouring or of equal numbers, alike in every lane."""
    rows = np.stack(lanes)
    steps = [int(gap[0]) if (gap == gap[0]).all() and gap[0] in (0, 1) else None for gap in np.diff(rows, axis=1).T]
    parts: list[Value] = []
    first = 0
    while first < rows.shape[1]:
        step = steps[first] if first < len(steps) else None
        last = first + 1
        while step is not None and last <= len(steps) and steps[last - 1] == step:
            last += 1
        start, count = _start(rows[:, first]), last - first
        parts.append(ops.arange(count, start) if step else ops.expand(ops.arange(1, start), [count]))
        first = last
    if ops.table.over("number_runs", len(parts)):
        raise Undescribed("numbers without a pattern")
    return ops.concat(parts, 0)


def _start(numbers: Array) -> Lane:
    return int(numbers[0]) if len(numbers) == 1 else collapse(numbers)
