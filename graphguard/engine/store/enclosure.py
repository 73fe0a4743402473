"""Between which numbers a described value lies, as far as its parts tell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from graphguard.engine.store.interval import ABOVE_ZERO, ANY, FROM_ZERO, RESULTS, Interval, exactly
from graphguard.engine.store.records import Records
from graphguard.engine.terms.term import IDX, Factor, Index, Range, Variable, bounds, substituted


def interval_of(
    table: Records, coefficient: Fraction, factors: Sequence[Factor], ranges: Mapping[Variable, Range], depth: int = 0
) -> Interval:
    """Between which numbers a product lies, wherever its factors are read."""
    interval = exactly(coefficient)
    for factor in factors:
        interval = interval.times(_of_factor(table, factor, ranges, depth))
    return interval


def _of_factor(table: Records, factor: Factor, ranges: Mapping[Variable, Range], depth: int) -> Interval:
    if factor.power == 1:
        return _of_atom(table, factor, ranges, depth)
    if factor.atom.positive:
        return ABOVE_ZERO
    whole = factor.power.denominator == 1
    if factor.power > 0 and (factor.atom.nonnegative or not whole or factor.power % 2 == 0):
        return FROM_ZERO
    return ABOVE_ZERO if factor.power < 0 and (not whole or factor.power % 2 == 0) else ANY


def _of_atom(table: Records, factor: Factor, ranges: Mapping[Variable, Range], depth: int) -> Interval:
    atom = factor.atom
    if atom is IDX:
        low, high = bounds(factor.at[0], ranges)
        return Interval(Fraction(int(np.min(low))), Fraction(int(np.max(high))))
    if atom.indicator:
        return Interval(Fraction(0), Fraction(1))
    stated = table.facts.stated(atom)
    if stated is not None:
        return stated
    whole = table.facts.span(factor, ranges)
    if whole is not None:
        return Interval(Fraction(whole[0]), Fraction(whole[1] - 1))
    interval = ABOVE_ZERO if atom.positive else FROM_ZERO if atom.nonnegative else ANY
    definition = table.definitions.get(atom)
    if definition is None:
        return interval
    if atom.kind == "function":
        if definition.name == "clamp":
            return _clamped(*definition.parameters)  # type: ignore[arg-type]
        if definition.name == "pow" and definition.parameters[0].denominator != 1:  # type: ignore[attr-defined] # a root
            return FROM_ZERO
        return RESULTS.get(definition.name, interval)
    if atom.kind == "lin" and not table.over("nested_sums", depth + 1):
        axes: dict[int, Index] = {-1 - n: index for n, index in enumerate(factor.at)}
        total = exactly(Fraction(0))
        for label, factors, extents in definition.operands[0]:
            if extents:
                return interval
            inner = [f._replace(at=tuple(substituted(i, axes) for i in f.at)) for f in factors]
            total = total.plus(interval_of(table, label[1], inner, ranges, depth + 1))  # type: ignore[index]
        return total if total.within(interval) else interval
    return interval


def _clamped(low: Fraction | None, high: Fraction | None) -> Interval:
    if low is not None and high is not None and low > high:
        return exactly(high)
    return Interval(-math.inf if low is None else low, math.inf if high is None else high)
