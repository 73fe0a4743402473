"""Between which numbers a described value lies, as far as its parts tell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphguard.engine.term import IDX, Factor, Index, Range, Variable, bounds, substituted

if TYPE_CHECKING:
    from graphguard.engine.table import Table

Number = Fraction | float  # the only floats are infinities
_MOST_DEPTH = 8  # of sums in sums


class Span(NamedTuple):
    """low <= x <= high, without an end that is open."""

    low: Number = -math.inf
    high: Number = math.inf
    low_open: bool = False
    high_open: bool = False

    def in_words(self, name: str) -> list[str]:
        """What is stated of an input."""
        low, high = (f"{float(end):g}" if math.isfinite(end) else None for end in (self.low, self.high))
        if low is None or high is None:
            return ([] if low is None else [f"{name} >= {low}"]) + ([] if high is None else [f"{name} < {high}"])
        return [f"{low} <= {name} < {high}"]

    def within(self, outer: Span) -> bool:
        low = self.low > outer.low or (self.low == outer.low and (self.low_open or not outer.low_open))
        high = self.high < outer.high or (self.high == outer.high and (self.high_open or not outer.high_open))
        return low and high

    def has_zero(self) -> bool:
        below = self.low < 0 or (self.low == 0 and not self.low_open)
        above = self.high > 0 or (self.high == 0 and not self.high_open)
        return below and above

    def plus(self, other: Span) -> Span:
        return Span(
            self.low + other.low, self.high + other.high, self.low_open or other.low_open, self.high_open or other.high_open
        )

    def times(self, other: Span) -> Span:
        ends = [
            _product(a, b)
            for a in ((self.low, self.low_open), (self.high, self.high_open))
            for b in ((other.low, other.low_open), (other.high, other.high_open))
        ]
        low, high = min(number for number, _ in ends), max(number for number, _ in ends)
        return Span(low, high, all(o for n, o in ends if n == low), all(o for n, o in ends if n == high))


def _product(a: tuple[Number, bool], b: tuple[Number, bool]) -> tuple[Number, bool]:
    if a[0] == 0 or b[0] == 0:  # 0 is there if one factor has it, whatever the other is
        return Fraction(0), (a[1] or a[0] != 0) and (b[1] or b[0] != 0)
    return a[0] * b[0], a[1] or b[1]


ANY = Span()
ABOVE_ZERO = Span(Fraction(0), low_open=True)
FROM_ZERO = Span(Fraction(0))
_SHARE = Span(Fraction(0), Fraction(1), True, True)
_TURN = Span(Fraction(-1), Fraction(1))
RESULTS = {  # of functions, whatever their operands are
    "sigmoid": _SHARE, "normal_share": _SHARE, "tanh": Span(Fraction(-1), Fraction(1), True, True), "sin": _TURN, "cos": _TURN,
    "sign": _TURN, "relu": FROM_ZERO, "abs": FROM_ZERO, "softplus": ABOVE_ZERO, "cosh": Span(Fraction(1)),
    "hypot": FROM_ZERO, "hardsigmoid": Span(Fraction(0), Fraction(1)), "frac": Span(Fraction(-1), Fraction(1), True, True),
}  # fmt: skip


def exactly(number: Fraction) -> Span:
    return Span(number, number)


def stated_span(low: float | None, high: float | None) -> Span:
    """Of an input with `low <= v < high`."""
    bounds = [None if end is None or math.isinf(end) else Fraction(end) for end in (low, high)]
    return Span(-math.inf if bounds[0] is None else bounds[0], math.inf if bounds[1] is None else bounds[1], high_open=True)


def span_of(
    table: Table, coefficient: Fraction, factors: Sequence[Factor], ranges: Mapping[Variable, Range], depth: int = 0
) -> Span:
    """Between which numbers a product lies, wherever its factors are read."""
    span = exactly(coefficient)
    for factor in factors:
        span = span.times(_of_factor(table, factor, ranges, depth))
    return span


def _of_factor(table: Table, factor: Factor, ranges: Mapping[Variable, Range], depth: int) -> Span:
    if factor.power == 1:
        return _of_atom(table, factor, ranges, depth)
    if factor.atom.positive:
        return ABOVE_ZERO
    whole = factor.power.denominator == 1
    if factor.power > 0 and (factor.atom.nonnegative or not whole or factor.power % 2 == 0):
        return FROM_ZERO
    return ABOVE_ZERO if factor.power < 0 and (not whole or factor.power % 2 == 0) else ANY


def _of_atom(table: Table, factor: Factor, ranges: Mapping[Variable, Range], depth: int) -> Span:
    atom = factor.atom
    if atom is IDX:
        low, high = bounds(factor.at[0], ranges)
        return Span(Fraction(int(np.min(low))), Fraction(int(np.max(high))))
    if atom.indicator:
        return Span(Fraction(0), Fraction(1))
    stated = table.spans.get(atom.id)
    if stated is not None:
        return stated
    whole = table.facts.span(factor, ranges)
    if whole is not None:
        return Span(Fraction(whole[0]), Fraction(whole[1] - 1))
    span = ABOVE_ZERO if atom.positive else FROM_ZERO if atom.nonnegative else ANY
    definition = table.definitions.get(atom.id)
    if definition is None:
        return span
    if atom.kind == "function":
        if definition.name == "clamp":
            low, high = definition.parameters
            return _clamped(low, high)
        if definition.name == "pow" and definition.parameters[0].denominator != 1:  # a root
            return FROM_ZERO
        return RESULTS.get(definition.name, span)
    if atom.kind == "lin" and depth < _MOST_DEPTH:
        axes: dict[int, Index] = {-1 - n: index for n, index in enumerate(factor.at)}
        total = exactly(Fraction(0))
        for label, factors, extents in definition.operands[0]:
            if extents:
                return span
            inner = [f._replace(at=tuple(substituted(i, axes) for i in f.at)) for f in factors]
            total = total.plus(span_of(table, label[1], inner, ranges, depth + 1))
        return total if total.within(span) else span
    return span


def _clamped(low: Fraction | None, high: Fraction | None) -> Span:
    if low is not None and high is not None and low > high:
        return exactly(high)
    return Span(-math.inf if low is None else low, math.inf if high is None else high)
