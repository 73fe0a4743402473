"""What number a program's float stands for.

A program writes `1 / 3` or `1e-5` and means a rational; the float that it holds is the nearest binary fraction. The rule:

    A float stands for the simplest fraction p/q that rounds to it, if |p| q is at most 2^40, else for its exact value.

Simplest means of the smallest denominator. So `1 / 3`, `0.1` and `1e-12` are what they say, three times a third is one, and
an irrational such as `8 ** -0.5` stays what it is in binary, as nothing that simple rounds to it.

Different floats stand for different rationals, since each rounds back to its own float: two programs that hold different
constants are never taken to hold the same.
"""

from __future__ import annotations

import math
from fractions import Fraction

LARGEST_PRODUCT = 1 << 40


def rational(number: float | int | bool) -> Fraction:
    """The rational that a finite number of a program stands for."""
    if isinstance(number, int):
        return Fraction(number)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a number that arithmetic can use")
    exact = Fraction(number)
    if exact.denominator == 1:
        return exact
    simple = _simplest(*_rounding_interval(abs(number)))
    if simple.numerator * simple.denominator > LARGEST_PRODUCT or float(simple) != abs(number):
        return exact
    return simple if number > 0 else -simple


def _rounding_interval(number: float) -> tuple[Fraction, Fraction]:
    """The reals between the midpoints to the neighbouring floats: all that may round to the number."""
    exact = Fraction(number)
    below, above = Fraction(math.nextafter(number, 0.0)), Fraction(math.nextafter(number, math.inf))
    return (below + exact) / 2, (exact + above) / 2


def _simplest(low: Fraction, high: Fraction) -> Fraction:
    """The fraction of smallest denominator in [low, high], 0 < low <= high: the common start of the two continued fractions."""
    whole = math.ceil(low)
    if whole <= high:
        return Fraction(whole)
    whole -= 1
    return whole + 1 / _simplest(1 / (high - whole), 1 / (low - whole))
