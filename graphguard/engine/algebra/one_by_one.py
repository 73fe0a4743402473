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
from graphguard.engine.algebra.names import Names, collected
from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import collapse
from graphguard.engine.terms.term import FIRST_ID, Index, Term, extent, substitute

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
    names, left = Names(table), dict[Hashable, Fraction]()
    for term in terms:
        for name, coefficient in _summands(table, names, term):
            total = left.get(name, Fraction(0)) + coefficient
            if total:
                left[name] = total
            else:
                left.pop(name, None)
    return not left


def _summands(table: Table, names: Names, term: Term) -> Iterator[tuple[Hashable, Fraction]]:
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
            product.append((element, factor))
        yield (collected(product), frame), term.coefficient


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
