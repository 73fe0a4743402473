"""When two terms are alike in all but the names of variables, and which variables correspond then."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction

from graphguard.engine.terms.lane import equal
from graphguard.engine.terms.term import STEP, Factor, Range, Term, Variable

Names = dict[Variable, Variable]
MOST_ORDERS = 6
MOST_ALIKE = 5  # factors of one atom, tried in other orders


def signature(term: Term) -> list[tuple[int, Fraction]]:
    return [(factor.atom.id, factor.power) for factor in term.factors]


def unstepped(term: Term) -> list[tuple[int, Fraction]]:
    """The signature without steps: blocks that a causal mask leaves whole have none."""
    return [(number, power) for number, power in signature(term) if number != STEP.id]


def same_term(a: Term, b: Term) -> bool:
    """Whether two terms in normal form are alike in all but the names of variables."""
    return (
        a.coefficient == b.coefficient
        and signature(a) == signature(b)
        and equal(a.weight, b.weight)
        and all(same_span(x, y) for x, y in zip(a.box, b.box, strict=True))
        and any(all(same_span(a.ranges[v], b.ranges[w]) for v, w in names.items()) for names, _ in matches(a, b))
    )


def same_span(a: Range, b: Range) -> bool:
    return equal(a[0], b[0]) and equal(a[1], b[1])


def matches(a: Term, b: Term, offsets: bool = True) -> Iterator[tuple[Names, Term]]:
    """The ways to rename the variables of one term to get the products of the other, which is given with its
    factors in the order in which they correspond."""
    if len(a.ranges) != len(b.ranges) or any(len(x) != len(y) for x, y in zip(a.dims, b.dims, strict=True)):
        return
    for factors in _orders(b.factors):
        names = _match(a, factors, b, offsets)
        if names is not None:
            yield names, b.with_(factors=factors)


def _orders(factors: tuple[Factor, ...]) -> Iterator[tuple[Factor, ...]]:
    runs = [list(run) for _, run in itertools.groupby(factors, lambda f: (f.atom.id, f.power))]
    if all(len(run) == 1 for run in runs) or any(len(run) > MOST_ALIKE for run in runs):
        yield factors
        return
    choices = itertools.product(*(itertools.permutations(run) for run in runs))
    for order in itertools.islice(choices, MOST_ORDERS):
        yield tuple(factor for run in order for factor in run)


def _match(a: Term, factors: tuple[Factor, ...], b: Term, offsets: bool) -> Names | None:
    names: Names = {}
    for x, y in zip(a.factors, factors, strict=True):
        for i, j in zip(x.at, y.at, strict=True):
            if len(i.terms) != len(j.terms) or (offsets and not equal(i.offset, j.offset)):
                return None
            for (v, s), (w, t) in zip(i.terms, j.terms, strict=True):
                if s != t or names.setdefault(v, w) != w:
                    return None
    for mine, its in zip(a.dims, b.dims, strict=True):
        for v, w in zip(mine, its, strict=True):
            if names.setdefault(v, w) != w:
                return None
    return names if len(set(names.values())) == len(names) == len(a.ranges) else None
