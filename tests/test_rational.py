import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphguard.engine.rational import LARGEST_PRODUCT, rational


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
        (0.1 + 0.2, Fraction(0.1 + 0.2)),
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
