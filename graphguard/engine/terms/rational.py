"""What number a program's float stands for.

A program writes `1 / 3` or `1e-5` and means a rational; the float that it holds is the nearest binary fraction. The rule:

    A float stands for the simplest fraction p/q that rounds to it, if |p| q is at most 2^40, else for its exact value.

Simplest means of the smallest denominator. So `1 / 3`, `0.1` and `1e-12` are what they say, three times a third is one, and
nothing that simple rounds to an irrational such as `8 ** -0.5`.

    A float for which that finds nothing stands for the simplest fraction within 4 ulps of it, and for one between 1e-5 and 1
    within 2^-52, if |p| q is at most 2^20; or for a decimal of at most 9 places within 2^-52.

For programs compute their constants: `1 - 0.999` is half an ulp of 1 away from 0.001, which is many of its own.

    A float that fits in single precision, and for which neither finds anything, stands for the simplest fraction that rounds
    to it in single precision, if |p| q is at most 2^20.

For torch itself passes some constants on in single precision: the eps of F.rms_norm is 1e-5 rounded to a float32. So a constant
and its own rounding to single precision are taken to be the same number.

    A float for which none of these finds anything stands for the square root, or else the fourth root, of the simplest
    fraction of which it is within an ulp, if |p| q is at most 2^16; or for the square root of a decimal of at most 9 places
    below 1, if its square is within 2^-52 of it.

Attention divides scores by `math.sqrt(d)`, multiplies them by `d ** -0.5`, or both operands by `d ** -0.25`: one number in
three ways. Adam divides by the root of `1 - 0.999 ** 2`.

    A float for which none of these finds anything stands for a simple fraction times pi or 1 / pi, or for the root of one, if
    it is within 3 ulps of it and |p| q is at most 2^10.

For gelu and its slope have `sqrt(2 / pi)` and `1 / sqrt(2 * pi)`. Any two other floats stand for different numbers.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

LARGEST_PRODUCT = 1 << 40
LARGEST_SINGLE_PRODUCT = 1 << 20
LARGEST_NEARBY_PRODUCT = 1 << 20
LARGEST_ROOT_PRODUCT = 1 << 16
ULP_OF_ONE = Fraction(1, 1 << 52)
PLACES = 10**9
SMALLEST_DECIMAL = Fraction(1, 10**5)
LARGEST_PI_PRODUCT = 1 << 10
LARGEST_FACTORED = 1 << 32
PI = Fraction(31415926535897932384626433832795, 10**31)


@lru_cache(maxsize=4096)
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
    found = _nearby(size) or _of_single_precision(size)
    return exact if found is None else found if number > 0 else -found


def _nearby(number: float) -> Fraction | None:
    """The number that a program has come close to by a few roundings."""
    exact = Fraction(number)
    window = max(4 * Fraction(math.ulp(number)), ULP_OF_ONE if SMALLEST_DECIMAL <= exact < 1 else Fraction(0))
    if window >= exact:
        return None
    simple = _simplest(exact - window, exact + window)
    if simple.numerator * simple.denominator <= LARGEST_NEARBY_PRODUCT:
        return simple
    return _decimal(exact)


def _decimal(exact: Fraction) -> Fraction | None:
    """A decimal of few places that a number below 1 has come close to."""
    decimal = Fraction(round(exact * PLACES), PLACES)
    return decimal if SMALLEST_DECIMAL <= exact < 1 and abs(decimal - exact) <= ULP_OF_ONE else None


class Irrational(NamedTuple):
    """The root of a degree of a fraction times a power of pi."""

    number: Fraction
    degree: int
    turns: int = 0


@lru_cache(maxsize=4096)
def irrational(number: float) -> Irrational | None:
    """What a float stands for; None if it is a rational."""
    if isinstance(number, int) or not math.isfinite(number) or number <= 0 or rational(number) != Fraction(number):
        return None
    if Fraction(number).denominator <= LARGEST_ROOT_PRODUCT:
        return None
    below, above = (Fraction(math.nextafter(number, end)) for end in (0.0, math.inf))
    for degree in (2, 4):
        simple = _simplest(below**degree, above**degree)
        if simple.numerator * simple.denominator <= LARGEST_ROOT_PRODUCT:
            return Irrational(simple, degree)
    decimal = _decimal(Fraction(number) ** 2)
    return _of_pi(number) if decimal is None else Irrational(decimal, 2)


def _of_pi(number: float) -> Irrational | None:
    window = 3 * Fraction(math.ulp(number))
    low, high = Fraction(number) - window, Fraction(number) + window
    for degree in (1, 2):
        for turns in (1, -1):
            simple = _simplest(low**degree / PI**turns, high**degree / PI**turns)
            if simple.numerator * simple.denominator <= LARGEST_PI_PRODUCT:
                return Irrational(simple, degree, turns)
    return None


@lru_cache(maxsize=4096)
def prime_powers(number: Fraction) -> tuple[tuple[int, int], ...] | None:
    """The primes of a positive fraction, with their powers; None if it is too large to tell."""
    if number.numerator > LARGEST_FACTORED or number.denominator > LARGEST_FACTORED:
        return None
    powers: dict[int, int] = {}
    for rest, sign in ((number.numerator, 1), (number.denominator, -1)):
        prime = 2
        while rest > 1:
            if prime * prime > rest:
                prime = rest
            while rest % prime == 0:
                powers[prime] = powers.get(prime, 0) + sign
                rest //= prime
            prime += 1
    return tuple(sorted(powers.items()))


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
