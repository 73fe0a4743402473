"""The second tier: two descriptions are equal if their difference vanishes when sums are written out.

It proves what the main path, which keeps the sequential program's own sums, cannot see: (xA)B = x(AB), (x + y)W = xW + yW, the
two formulas of a variance, a sum that is grouped in another way. The youngest sum is written out first; the limits are small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product as choices

from graphguard.engine.algebra import one_by_one
from graphguard.engine.algebra.fingerprint import may_be_equal
from graphguard.engine.algebra.grid import covers, in_cells
from graphguard.engine.algebra.merge import merged, scattered
from graphguard.engine.algebra.value import cut, scale
from graphguard.engine.store.mask_ranges import narrowed
from graphguard.engine.store.table import Table
from graphguard.engine.terms.definition import Product
from graphguard.engine.terms.lane import equal
from graphguard.engine.terms.term import ONE, Atom, Factor, Index, Term, Undescribed, Value, substituted


def equal_written_out(table: Table, a: Value, b: Value) -> bool:
    """Whether a - b is zero once sums are written out; where their pieces do not lie alike, in each cell of both grids."""
    table.journal.spoil()  # the work is bounded for all that an output is made of
    if not may_be_equal(table, a, b):
        return False
    folding, table.folding = table.folding, False
    work, vanishes = _Work(), False
    try:
        vanishes = _vanishes(table, Value(a.shape, merged(table, [*a.terms, *scale(b, -ONE).terms])), work)
    except Undescribed:
        pass
    finally:
        table.folding = folding
    if not vanishes:
        table.stops.charge(work.terms)
    return vanishes


@dataclass
class _Work:
    """What is written out for one comparison."""

    terms: int = 0


def _vanishes(table: Table, value: Value, work: _Work) -> bool:
    """Whether a tensor is zero: as it is, in each cell of its grid, or in each row, where rows were joined by chance. Where
    elements are compared one by one the cells come first, which have fewer."""
    whole = all(covers(term.box, value.shape) for term in value.terms)
    attempts = [_is_zero_in_cells, _is_zero_at_once][:: 1 if table.limits.scattered > 1 else -1]
    if any(attempt(table, value, work) for attempt in ([_is_zero_at_once] if whole else attempts)):
        return True
    dim = next((dim for dim, size in enumerate(value.shape) if not equal(size, 1) and _is_slanted(value, dim)), None)
    size = value.shape[dim] if dim is not None else None
    if dim is None or not isinstance(size, int) or table.over("scattered", size * len(value.terms)):
        return False
    return all(_vanishes(table, cut(table, value, dim, row, row + 1), work) for row in range(size))


def _is_zero_at_once(table: Table, value: Value, work: _Work) -> bool:
    return _is_zero(table, value.terms, work)


def _is_zero_in_cells(table: Table, value: Value, work: _Work) -> bool:
    try:
        return all(_is_zero(table, merged(table, inside), work) for _, inside in in_cells(table, value))
    except Undescribed:
        return False


def _is_slanted(value: Value, dim: int) -> bool:
    """Whether a term does not go along one axis of each factor, element by element, as it goes along a dim."""
    for term in value.terms:
        if len(term.dims[dim]) > 1:
            return True
        for factor in term.factors:
            strides = [stride for index in factor.at for v, stride in index.terms if v in term.dims[dim]]
            if strides and strides != [1]:
                return True
    return False


def _is_zero(table: Table, terms: tuple[Term, ...], work: _Work) -> bool:
    """Whether the terms are nothing once sums are written out, the youngest first. At the end, sums whose elements lie apart
    are compared element by element: which of them were joined is chance."""
    for _ in range(table.limits.steps):
        if not terms or _cancel(table, terms):
            return True
        expanded = (f.atom for term in terms for f in term.factors if expandable(table, f))
        youngest = max(expanded, key=lambda atom: atom.id, default=None)
        work.terms += len(terms)
        if youngest is None:
            return scattered(table, terms) == []
        if table.over("written_terms", len(terms)) or not table.stops.allows(work.terms):
            return False
        written = [each for term in terms for each in written_out(table, term, youngest)]
        terms = merged(table, [each for each in (_trimmed(table, term) for term in written) if each is not None])
    table.stops.note("steps")
    return False


def _cancel(table: Table, terms: tuple[Term, ...]) -> bool:
    """Whether the terms cancel each other element by element: sums that both sides have need not be written out."""
    count = one_by_one.summands(terms)
    return count is not None and count <= table.limits.scattered and one_by_one.cancel(table, terms)


def _trimmed(table: Table, term: Term) -> Term | None:
    shorter = narrowed(term)
    return term if shorter is term else table.settle(shorter)


def expandable(table: Table, factor: Factor) -> bool:
    sums = factor.atom.kind in ("lin", "sum") and factor.power.denominator == 1 and factor.power > 0
    return sums and not table.over("written_power", int(factor.power))


def written_out(table: Table, term: Term, atom: Atom) -> Iterator[Term]:
    """The term with an atom replaced by what it is a sum of."""
    chosen = [f for f in term.factors if f.atom is atom and expandable(table, f)]
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
