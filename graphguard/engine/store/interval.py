"""Between which numbers something lies."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

Number = Fraction | float  # the only floats are infinities


class Interval(NamedTuple):
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

    def within(self, outer: Interval) -> bool:
        low = self.low > outer.low or (self.low == outer.low and (self.low_open or not outer.low_open))
        high = self.high < outer.high or (self.high == outer.high and (self.high_open or not outer.high_open))
        return low and high

    def has_zero(self) -> bool:
        below = self.low < 0 or (self.low == 0 and not self.low_open)
        above = self.high > 0 or (self.high == 0 and not self.high_open)
        return below and above

    def plus(self, other: Interval) -> Interval:
        return Interval(
            self.low + other.low, self.high + other.high, self.low_open or other.low_open, self.high_open or other.high_open
        )

    def times(self, other: Interval) -> Interval:
        ends = [
            _product(a, b)
            for a in ((self.low, self.low_open), (self.high, self.high_open))
            for b in ((other.low, other.low_open), (other.high, other.high_open))
        ]
        low, high = min(number for number, _ in ends), max(number for number, _ in ends)
        return Interval(low, high, all(o for n, o in ends if n == low), all(o for n, o in ends if n == high))


def _product(a: tuple[Number, bool], b: tuple[Number, bool]) -> tuple[Number, bool]:
    if a[0] == 0 or b[0] == 0:  # 0 is there if one factor has it, whatever the other is
        return Fraction(0), (a[1] or a[0] != 0) and (b[1] or b[0] != 0)
    return a[0] * b[0], a[1] or b[1]


ANY = Interval()
ABOVE_ZERO = Interval(Fraction(0), low_open=True)
FROM_ZERO = Interval(Fraction(0))
_SHARE = Interval(Fraction(0), Fraction(1), True, True)
_TURN = Interval(Fraction(-1), Fraction(1))
_OPEN_TURN = Interval(Fraction(-1), Fraction(1), True, True)
RESULTS = {  # of functions, whatever their operands are
    "sigmoid": _SHARE, "normal_share": _SHARE, "tanh": _OPEN_TURN, "frac": _OPEN_TURN, "sin": _TURN, "cos": _TURN,
    "sign": _TURN, "relu": FROM_ZERO, "abs": FROM_ZERO, "softplus": ABOVE_ZERO, "cosh": Interval(Fraction(1)),
    "hypot": FROM_ZERO, "hardsigmoid": Interval(Fraction(0), Fraction(1)),
}  # fmt: skip


def exactly(number: Fraction) -> Interval:
    return Interval(number, number)


def stated_interval(low: float | None, high: float | None) -> Interval:
    """Of an input with `low <= v < high`."""
    bounds = [None if end is None or math.isinf(end) else Fraction(end) for end in (low, high)]
    return Interval(-math.inf if bounds[0] is None else bounds[0], math.inf if bounds[1] is None else bounds[1], high_open=True)
