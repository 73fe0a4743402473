"""The second tier: two descriptions are equal if their difference vanishes when sums are written out.

It proves what the main path, which keeps the sequential program's own sums, cannot see: (xA)B = x(AB), (x + y)W = xW + yW, the
two formulas of a variance, a sum that is grouped in another way. The youngest sum is written out first; both caps are small.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product as choices

from graphguard.engine.definition import Product
from graphguard.engine.grid import covers, in_cells
from graphguard.engine.merge import merged
from graphguard.engine.sample import may_be_equal
from graphguard.engine.table import Table
from graphguard.engine.term import ONE, Factor, Index, Term, Undescribed, Value, substituted
from graphguard.engine.value import scale
from graphguard.engine.widen import narrowed

MOST_STEPS = 24
MOST_TERMS = 32
MOST_WORK = 1000  # terms written out in vain in one proof: what is wrong would be written out to no end
HIGHEST_POWER = 3


def equal_written_out(table: Table, a: Value, b: Value) -> bool:
    """Whether a - b is zero once sums are written out; where their pieces do not lie alike, in each cell of both grids."""
    table.spoil_trace()  # the work is bounded for the proof as a whole
    if not may_be_equal(table, a, b):
        return False
    folding, table.folding = table.folding, False
    before = table.written
    try:
        terms = merged(table, [*a.terms, *scale(b, -ONE).terms])
        pieces = (merged(table, inside) for _, inside in in_cells(table, Value(a.shape, terms)))
        whole = all(covers(term.box, a.shape) for term in terms)
        equal = _vanish(table, terms) or (not whole and all(_vanish(table, piece) for piece in pieces))
        table.written = before if equal else table.written
        return equal
    except Undescribed:
        return False
    finally:
        table.folding = folding


def _vanish(table: Table, terms: tuple[Term, ...]) -> bool:
    """Whether the terms are nothing once sums are written out, the youngest first."""
    for _ in range(MOST_STEPS):
        if not terms:
            return True
        youngest = max((f.atom.id for term in terms for f in term.factors if expandable(table, f)), default=None)
        table.written += len(terms)
        if youngest is None or len(terms) > MOST_TERMS or table.written > MOST_WORK:
            return False
        written = [each for term in terms for each in written_out(table, term, youngest)]
        terms = merged(table, [each for each in (_trimmed(table, term) for term in written) if each is not None])
    return False


def _trimmed(table: Table, term: Term) -> Term | None:
    shorter = narrowed(term)
    return term if shorter is term else table.settle(shorter)


def expandable(table: Table, factor: Factor) -> bool:
    return factor.atom.kind in ("lin", "sum") and factor.power.denominator == 1 and 0 < factor.power <= HIGHEST_POWER


def written_out(table: Table, term: Term, atom: int) -> Iterator[Term]:
    """The term with an atom replaced by what it is a sum of."""
    chosen = [f for f in term.factors if f.atom.id == atom and expandable(table, f)]
    if not chosen:
        yield term
        return
    rest = [f for f in term.factors if not any(f is c for c in chosen)]
    copies = [f for f in chosen for _ in range(int(f.power))]
    members = table.definitions[atom].operands[0]
    for selection in choices(members, repeat=len(copies)):
        settled = table.settle(_product(table, term, rest, copies, selection))
        if settled is not None:
            yield settled


def _product(table: Table, term: Term, rest: list[Factor], copies: list[Factor], members: tuple[Product, ...]) -> Term:
    coefficient, factors, ranges = term.coefficient, list(rest), dict(term.ranges)
    for factor, member in zip(copies, members, strict=True):
        names: dict[int, Index] = {-1 - n: index for n, index in enumerate(factor.at)}
        for number, size in enumerate(member.extents):
            variable = next(table.names)
            names[number], ranges[variable] = Index(((variable, 1),)), (0, size)
        coefficient *= member.label[1]  # type: ignore[index]
        factors += [f._replace(at=tuple(substituted(i, names) for i in f.at)) for f in member.factors]
    return term.with_(coefficient=coefficient, factors=tuple(factors), ranges=ranges)
