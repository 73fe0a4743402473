"""Sums of products, element by element: which elements were joined into one term is chance where rows go ways of their own.

    Σ_k x[2 k] · y[k]  +  x[1] · y[5]    as    x[0] y[0] + x[2] y[1] + ... + x[1] y[5]

Each summand is named by its factors alone, at positions of the tensor's own dims. What is there as often with a plus as with a
minus is nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from fractions import Fraction
from itertools import product as choices
from math import prod

from graphguard.engine.algebra.infinities import has_garbage, has_infinities
from graphguard.engine.algebra.names import Names, Powers
from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import collapse
from graphguard.engine.terms.term import FIRST_ID, Index, Term, extent, substitute

Name = tuple[Powers, Hashable]  # a product, and which elements of the tensor it is of
_SPECIAL = {"delta", "number"}


def summands(terms: Sequence[Term]) -> int | None:
    """How many there are in all; None if ranks have different numbers of them."""
    count = 0
    for term in terms:
        sizes = [extent(term.ranges[v]) for v in term.summed]
        if not all(isinstance(size, int) for size in sizes):
            return None
        count += prod(int(size) for size in sizes)
    return count


def cancel(table: Table, terms: Sequence[Term]) -> bool:
    """Whether nothing is left of the terms. Infinity minus infinity is not nothing."""
    if any(has_infinities(table, term) or has_garbage(table, term) for term in terms):
        return False
    names, left = Names(table), Left()
    for term in terms:
        for name, coefficient in _summands(table, names, term):
            left.add(name, coefficient)
    return all(_cancel_over_divisors(names, each, table.limits.scattered) for each in _with_common_divisors(left))


class Left:
    """What is left of summands, by their names."""

    def __init__(self) -> None:
        self.products: dict[Name, Fraction] = {}

    def add(self, name: Name, coefficient: Fraction) -> None:
        total = self.products.get(name, Fraction(0)) + coefficient
        if total:
            self.products[name] = total
        else:
            self.products.pop(name, None)


def _with_common_divisors(left: Left) -> list[Left]:
    """Summands in groups that share no divisor: each group has to be nothing by itself. One that is divided by nothing may
    belong to any of them, so that all are one group then."""
    groups: list[tuple[set[int], Left]] = []
    for name, coefficient in left.products.items():
        divisors = _divisors(name[0])
        if not divisors:
            return [left]
        mine, together = set(divisors), Left()
        together.add(name, coefficient)
        for group in [each for each in groups if not each[0].isdisjoint(divisors)]:
            groups.remove(group)
            mine |= group[0]
            together.products |= group[1].products
        groups.append((mine, together))
    return [group for _, group in groups]


def _divisors(powers: Powers) -> list[int]:
    return [element for element, power in powers if power < 0 and power.denominator == 1]


def _cancel_over_divisors(names: Names, left: Left, most: int) -> bool:
    """Whether nothing is left once no summand is divided by a sum: all are multiplied with it as often as one is divided by it.
    a / (a + b) + b / (a + b) is 1 where a + b is not 0, which it is nowhere that a program divides by it."""
    for divisor in sorted({each for powers, _ in left.products for each in _divisors(powers)}):
        parts = names.summands_of(divisor)
        if parts is None:
            continue
        often = max(-_power(powers, divisor) for powers, _ in left.products)
        times = {name: int(often + _power(name[0], divisor)) for name in left.products}
        if sum(len(parts) ** each for each in times.values()) > most:
            return False
        before, left = left.products, Left()
        for (powers, frame), coefficient in before.items():
            above = [(e, power) for e, power in powers if e != divisor or power > 0]
            for chosen in choices(parts, repeat=times[powers, frame]):
                factors = names.collected([*above, *(each for _, more in chosen for each in more)])
                left.add((factors, frame), coefficient * prod(number for number, _ in chosen))
        if not left.products:
            return True
    return False


def _power(powers: Powers, element: int) -> Fraction:
    return next((power for e, power in powers if e == element and power < 0), Fraction(0))


def _summands(table: Table, names: Names, term: Term) -> Iterator[tuple[Name, Fraction]]:
    """Each by its name, and how often it is there."""
    if any(factor.atom.id < FIRST_ID or factor.atom.kind in _SPECIAL for factor in term.factors):
        for each in _settled(table, term):
            yield names.of_product(each), each.coefficient
        return
    frame, places = names.of_frame(term), names.of_dims(term)
    summed = term.summed
    factors = [(factor, [v for v in summed if v in set(factor.variables())]) for factor in term.factors]
    known: list[dict[Hashable, int]] = [{} for _ in factors]
    starts = {v: term.ranges[v][0] for v in summed}
    for steps in choices(*(range(int(extent(term.ranges[v]))) for v in summed)):
        at = dict(zip(summed, steps, strict=True))
        product = []
        for (factor, mine), seen in zip(factors, known, strict=True):
            here = tuple([at[v] for v in mine])
            element = seen.get(here)
            if element is None:
                there = {**places, **{v: ((), collapse(starts[v] + at[v])) for v in mine}}
                element = seen[here] = names.of_factor(factor, there)
            product.append((element, factor.power))
        yield (names.collected(product), frame), term.coefficient


def _settled(table: Table, term: Term) -> Iterator[Term]:
    """The same for terms with masks and the like, which are nothing at some of their elements."""
    summed = term.summed
    kept = {v: span for v, span in term.ranges.items() if v not in summed}
    starts = [term.ranges[v][0] for v in summed]
    for steps in choices(*(range(int(extent(term.ranges[v]))) for v in summed)):
        at = {v: Index((), collapse(low + step)) for v, low, step in zip(summed, starts, steps, strict=True)}
        settled = table.settle(term.with_(factors=substitute(term.factors, at), ranges=kept))
        if settled is not None:
            yield settled
