"""What number a program's float stands for.

A program writes `1 / 3` or `1e-5` and means a rational; the float that it holds is the nearest binary fraction. The rule:

    A float stands for the simplest fraction p/q that rounds to it, if |p| q is at most 2^40, else for its exact value.

Simplest means of the smallest denominator. So `1 / 3`, `0.1` and `1e-12` are what they say, three times a third is one, and
an irrational such as `8 ** -0.5` stays what it is in binary, as nothing that simple rounds to it.

    A float that fits in single precision, and for which that finds nothing, stands for the simplest fraction that rounds to it
    in single precision, if |p| q is at most 2^20.

For torch itself passes some constants on in single precision: the eps of F.rms_norm is 1e-5 rounded to a float32. So a constant
and its own rounding to single precision are taken to be the same number. Any two other floats stand for different rationals.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

LARGEST_PRODUCT = 1 << 40
LARGEST_SINGLE_PRODUCT = 1 << 20


def rational(number: float | int | bool) -> Fraction:
    """The rational that a finite number of a program stands for."""
    if isinstance(number, int):
        return Fraction(number)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a number that arithmetic can use")
    exact = Fraction(number)
    if exact.denominator == 1:
        return exact
    size = abs(number)
    simple = _simplest(*_rounding_interval(size))
    if simple.numerator * simple.denominator <= LARGEST_PRODUCT and float(simple) == size:
        return simple if number > 0 else -simple
    single = _of_single_precision(size)
    return exact if single is None else single if number > 0 else -single


def _of_single_precision(number: float) -> Fraction | None:
    """The simple fraction that a number was before it was rounded to single precision."""
    rounded = np.float32(number)
    if float(rounded) != number or not 1e-30 < number < 1e30:
        return None
    exact = Fraction(number)
    below, above = (Fraction(float(np.nextafter(rounded, np.float32(end)))) for end in (0.0, np.inf))
    simple = _simplest((below + exact) / 2, (exact + above) / 2)
    small = simple.numerator * simple.denominator <= LARGEST_SINGLE_PRODUCT
    return simple if small and float(np.float32(float(simple))) == number else None


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
