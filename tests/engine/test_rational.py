import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphguard.engine.terms.rational import LARGEST_PRODUCT, Irrational, irrational, prime_powers, rational


@pytest.mark.parametrize(
    ("number", "meaning"),
    [
        (True, Fraction(1)),
        (7, Fraction(7)),
        (2.0, Fraction(2)),
        (-0.0, Fraction(0)),
        (1 / 8, Fraction(1, 8)),
        (1 / 3, Fraction(1, 3)),
        (-2 / 7, Fraction(-2, 7)),
        (0.333, Fraction(333, 1000)),
        (0.9, Fraction(9, 10)),
        (1e-5, Fraction(1, 10**5)),
        (1e-12, Fraction(1, 10**12)),
        (1.702, Fraction(851, 500)),
        (1e300, Fraction(1e300)),
        (5e-324, Fraction(5e-324)),
        (8**-0.5, Fraction(8**-0.5)),
        (math.pi, Fraction(math.pi)),
        (0.1 + 0.2, Fraction(3, 10)),
        (1 - 0.999, Fraction(1, 1000)),
        (1 - 0.9**2, Fraction(19, 100)),
        (1 - 0.999**3, Fraction(2997001, 10**9)),
        (0.1 * 8 / 7, Fraction(4, 35)),
        (0.3333333333333, Fraction(0.3333333333333)),
    ],
)
def test_a_float_stands_for_the_fraction_that_was_meant(number, meaning):
    assert rational(number) == meaning


def test_three_thirds_are_one_and_a_truncated_third_is_not_a_third():
    assert 3 * rational(1 / 3) == 1
    assert rational(0.333) != rational(1 / 3)
    assert rational(0.3333333333333333) == rational(1 / 3)  # the same float
    assert rational(0.333333333333333) != rational(1 / 3)  # one digit less: another float


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_rounds_back_from_its_rational(number):
    back = float(rational(number))
    assert back == number or float(np.float32(back)) == number


@pytest.mark.parametrize("number", [1e-5, 0.1, 1e-6, 1 / 3, 0.9])
def test_a_constant_and_its_rounding_to_single_precision_are_one_number(number):
    assert rational(float(np.float32(number))) == rational(number)


def test_single_precision_takes_nothing_else_for_the_same():
    neighbour = float(np.nextafter(np.float32(1e-5), np.float32(1)))
    assert rational(neighbour) == Fraction(neighbour)
    assert rational(float(np.float32(8**-0.5))) == Fraction(float(np.float32(8**-0.5)))


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_simple_fractions_are_recovered_exactly(p, q):
    assert rational(p / q) == Fraction(p, q)


@given(st.floats(1e-6, 1e6))
def test_what_is_not_the_exact_value_is_simple(number):
    meaning = rational(number)
    assert meaning == Fraction(number) or meaning.numerator * meaning.denominator <= LARGEST_PRODUCT


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_infinities_and_nan_are_no_rationals(number):
    with pytest.raises(ValueError, match="not a number that arithmetic can use"):
        rational(number)


@pytest.mark.parametrize(
    ("number", "meaning"),
    [
        (2**-0.5, (Fraction(1, 2), 2)),
        (1 / math.sqrt(2), (Fraction(1, 2), 2)),
        (math.sqrt(128), (Fraction(128), 2)),
        (128**-0.25, (Fraction(1, 128), 4)),
        (64**-0.5, None),
        (0.1 + 0.2, None),
        (1 / 3, None),
        (1.4142, None),
        (-math.sqrt(2), None),
        ((1 - 0.999**2) ** 0.5, (Fraction("0.001999"), 2)),
        (math.sqrt(1 - 0.999**3), (Fraction("0.002997001"), 2)),
        (0.0447101778, None),
    ],
)
def test_a_float_within_an_ulp_of_a_root_stands_for_the_root(number, meaning):
    assert irrational(number) == (meaning and Irrational(*meaning))


@pytest.mark.parametrize(
    ("number", "meaning"),
    [
        (math.pi, (1, 1, 1)),
        (math.pi / 180, (Fraction(1, 180), 1, 1)),
        (math.sqrt(2 / math.pi), (2, 2, -1)),
        (1 / math.sqrt(2 * math.pi), (Fraction(1, 2), 2, -1)),
        (2 / math.sqrt(math.pi), (4, 2, -1)),
        (3.14159, None),
        (0.79788456, None),
        (math.e, None),
    ],
)
def test_a_float_near_a_simple_multiple_of_pi_or_its_root_stands_for_that(number, meaning):
    assert irrational(number) == (meaning and Irrational(*meaning))


@given(st.fractions(min_value=Fraction(1, 4000), max_value=4000, max_denominator=4000))
def test_a_fraction_is_the_product_of_its_primes(number):
    assert math.prod((Fraction(prime) ** times for prime, times in prime_powers(number)), start=Fraction(1)) == number
