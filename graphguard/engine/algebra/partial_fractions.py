"""Partial fractions: where d + b = t, the share b / t of something that d divides is b / (d t) = 1 / d - 1 / t.

So a mean over some blocks, moved towards the mean of one more block by that block's share of the weight, is the mean over all:
n / d - (n / d - m / b) b / t is (n + m) / t.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from graphguard.engine.algebra.expansion import equal_written_out
from graphguard.engine.algebra.merge import merged
from graphguard.engine.store.folding import connected
from graphguard.engine.store.positive import is_positive
from graphguard.engine.store.table import Table
from graphguard.engine.terms.term import ONE, Factor, Term, Value, extent, mentioned


def in_shares(table: Table, value: Value) -> Value:
    """The value with the fractions of its terms parted."""
    parted = [_parted(table, term) for term in value.terms]
    if all(each is None for each in parted):
        return value
    terms = [part for term, each in zip(value.terms, parted, strict=True) for part in (each or [term])]
    return Value(value.shape, merged(table, terms))


def _parted(table: Table, term: Term) -> list[Term] | None:
    below = [f for f in term.factors if f.atom.kind in ("sum", "lin") and f.power.numerator == -1 and f.power == -1]
    if len(below) < 2 or not term.visible.issuperset(mentioned(below)) or table.over("divisors", len(below)):
        return None
    for part in _numerators(term):
        for less, whole in permutations(below, 2):
            if _adds_up(table, term, less, part, whole):
                rest = tuple(f for f in term.factors if not any(f is gone for gone in (*part, less, whole)))
                return [*_over(table, term, rest, less, 1), *_over(table, term, rest, whole, -1)]
    return None


def _numerators(term: Term) -> Iterator[tuple[Factor, ...]]:
    """The sums that a term is multiplied with, open or not."""
    summed = set(term.summed)
    left = set(summed)
    while left:
        inside, bound = connected(term, min(left), summed)
        left -= set(bound)
        yield inside
    for factor in term.factors:  # one that is summed with others is no sum by itself
        if factor.power == 1 and factor.atom.kind in ("sum", "lin") and not mentioned([factor]) & summed:
            yield (factor,)


def _adds_up(table: Table, term: Term, less: Factor, part: tuple[Factor, ...], whole: Factor) -> bool:
    """Whether one divisor and a numerator are the other divisor, and neither divisor is zero anywhere."""
    if not all(is_positive(table, f, term.ranges, term.weight) for f in (less, whole)):
        return False
    shape = tuple(extent(span) for span in term.box)
    home = tuple((0, size) for size in shape)

    def alone(*factors: Factor) -> list[Term]:
        kept = term.visible | mentioned(factors)
        ranges = {v: span for v, span in term.ranges.items() if v in kept}
        settled = table.settle(term.with_(coefficient=ONE, factors=factors, ranges=ranges, box=home))
        return [] if settled is None else [settled]

    both = Value(shape, (*alone(less._replace(power=ONE)), *alone(*part)))
    return equal_written_out(table, both, Value(shape, tuple(alone(whole._replace(power=ONE)))))


def _over(table: Table, term: Term, rest: tuple[Factor, ...], divisor: Factor, sign: int) -> list[Term]:
    factors = (*rest, divisor)
    kept = term.visible | mentioned(factors)
    ranges = {v: span for v, span in term.ranges.items() if v in kept}
    settled = table.settle(term.with_(coefficient=term.coefficient * sign, factors=factors, ranges=ranges))
    return [] if settled is None else [settled]
