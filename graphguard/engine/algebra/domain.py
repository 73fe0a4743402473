"""Which functions are not defined everywhere, and where they are.

A power of a single value is no function: it needs a value that is not zero, or not negative. Of an operator without a
description nothing is known, so it may be undefined anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from fractions import Fraction
from typing import NamedTuple

from graphguard.engine.store.interval import ABOVE_ZERO, FROM_ZERO, Interval


class Domain(NamedTuple):
    """Of which numbers a function has a value. `text` says it of an operand in words."""

    text: str
    allowed: Interval | None = None  # None: all but zero
    operand: int = 0


NOT_ZERO_TEXT = "{} != 0"
ABOVE = Domain("{} > 0", ABOVE_ZERO)
FROM = Domain("{} >= 0", FROM_ZERO)
_WITHIN_ONE = Domain("-1 <= {} <= 1", Interval(Fraction(-1), Fraction(1)))
_QUARTER = Fraction(math.pi / 2)  # the double is below the number
_GAMMA = Domain("{} is no whole number below 1", ABOVE_ZERO)
PARTIAL: Mapping[str, Domain] = {
    "log": ABOVE,
    "log2": ABOVE,
    "log10": ABOVE,
    "xlogy": ABOVE._replace(operand=1),
    "floor_divide": Domain(NOT_ZERO_TEXT, operand=1),
    "remainder": Domain(NOT_ZERO_TEXT, operand=1),
    "fmod": Domain(NOT_ZERO_TEXT, operand=1),
    "asin": _WITHIN_ONE,
    "acos": _WITHIN_ONE,
    "acosh": Domain("{} >= 1", Interval(Fraction(1))),
    "atanh": Domain("-1 < {} < 1", Interval(Fraction(-1), Fraction(1), True, True)),
    "tan": Domain("cos({}) != 0", Interval(-_QUARTER, _QUARTER)),
    "lgamma": _GAMMA,
    "digamma": _GAMMA,
    "power": ABOVE,  # of whole numbers it is an operator of which nothing is known
}


def domain_of(name: str, parameters: tuple[Hashable, ...]) -> Domain | None:
    """The domain of a function; None if it is defined everywhere. A root is a function where signs are not known."""
    if name != "pow":
        return PARTIAL.get(name)
    exponent: Fraction = parameters[0]  # type: ignore[assignment]
    if exponent.denominator == 1:
        return Domain(NOT_ZERO_TEXT) if exponent < 0 else None
    return ABOVE if exponent < 0 else FROM
