"""Operands of functions that are equal to an operand of the sequential program, though put together in another way.

Where a function would get an operand that the sequential program does not know, those that it does know are tried: made of the
same tensors, on the same range, equal when both are written out. So the two formulas of a variance meet under a root.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from fractions import Fraction

from graphguard.engine.algebra.expansion import equal_written_out
from graphguard.engine.algebra.value import cut_term
from graphguard.engine.store.journal import spoils
from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import Lane, collapse, equal, everywhere
from graphguard.engine.terms.term import (
    FIRST_ID,
    ONE,
    Atom,
    Factor,
    Index,
    Term,
    Undescribed,
    Value,
    Variable,
    extent,
    substitute,
    substituted,
)


def recognised(table: Table, term: Term) -> Term:
    """The term, or the sequential operand that it is equal to; of a product, each sum in it."""
    if not _is_sum(term):
        return term if table.recording or term.summed else _with_known_sums(table, term)
    if table.recording:
        table.sums.note_operand(term)
        return term
    if table.sums.is_operand(term.factors[0].atom):
        return term
    tries = 0
    made_of = leaves(table, term.factors[0].atom)
    bare = _bare(term)
    for known in map(_bare, table.sums.operands()):
        if len(known.dims) != len(bare.dims) or leaves(table, known.factors[0].atom) != made_of:
            continue
        tries += 1
        if table.over("operands", tries):
            break
        part = _same_range(table, known, bare)
        if part is None:
            continue
        number = next((number for number in _ratios(bare, part) if _equals(table, bare, part, number)), None)
        if number is not None:
            groups = iter(part.dims)
            dims = tuple(next(groups) if dim else () for dim in term.dims)
            return part.with_(coefficient=part.coefficient * number, dims=dims, box=term.box)
    return term


def _with_known_sums(table: Table, term: Term) -> Term:
    """The product with sums of the sequential program's operands in place of the ranks' own that are equal to them."""
    for place, factor in enumerate(term.factors):
        alone = term.with_(coefficient=ONE, factors=(factor,), weight=1)
        if factor.atom.kind != "sum" or not _is_sum(alone) or table.sums.is_filed(factor.atom):
            continue
        known = recognised(table, alone)
        names = None if known is alone else _renamed(known, term)
        if names is not None:
            factors = (*term.factors[:place], *substitute(known.factors, names), *term.factors[place + 1 :])
            return _with_known_sums(table, term.with_(coefficient=term.coefficient * known.coefficient, factors=factors))
    return term


def _renamed(known: Term, term: Term) -> dict[Variable, Index] | None:
    """The variables of a known part as those of a term that covers the same elements."""
    if any(len(mine) != len(its) for mine, its in zip(term.dims, known.dims, strict=True)):
        return None
    pairs = [(v, w) for mine, its in zip(term.dims, known.dims, strict=True) for v, w in zip(mine, its, strict=True)]
    if not all(equal(extent(term.ranges[v]), extent(known.ranges[w])) for v, w in pairs):
        return None
    return {w: Index(((v, 1),), collapse(known.ranges[w][0] - term.ranges[v][0])) for v, w in pairs}


def _ratios(term: Term, part: Term) -> list[Fraction]:
    """How often a term may be a part: once, or as often as their coefficients say, as sums are kept with a lead of 1."""
    ratio = term.coefficient / part.coefficient
    return [ONE] if ratio == 1 else [ONE, ratio]


def _equals(table: Table, term: Term, part: Term, number: Fraction) -> bool:
    shape = tuple(extent(span) for span in term.box)
    home = tuple((0, size) for size in shape)
    part = part.with_(coefficient=part.coefficient * number, box=home)
    return equal_written_out(table, Value(shape, (term.with_(box=home),)), Value(shape, (part,)))


def _bare(term: Term) -> Term:
    """The term without dims of one element, which a mean may have kept or not."""
    kept = [dim for dim, group in enumerate(term.dims) if group]
    return term.with_(dims=tuple(term.dims[dim] for dim in kept), box=tuple(term.box[dim] for dim in kept))


def _is_sum(term: Term) -> bool:
    return len(term.factors) == 1 and term.factors[0].atom.kind in ("lin", "sum") and term.factors[0].power == 1


@spoils
def leaves(table: Table, atom: Atom) -> frozenset[int]:
    """The atoms that a sum comes down to when it is written out."""
    answers = table.answers["leaves"]
    known: frozenset[int] | None = answers.get(atom.id)
    if known is None:
        found: set[int] = set()
        for product in table.definitions[atom].operands[0]:
            for factor in product.factors:
                if factor.atom.kind in ("lin", "sum") and factor.power > 0 and factor.power.denominator == 1:
                    found |= leaves(table, factor.atom)
                elif factor.atom.id >= FIRST_ID:
                    found.add(factor.atom.id)
        known = answers[atom.id] = frozenset(found)
    return known


def _same_range(table: Table, known: Term, term: Term) -> Term | None:
    """The part of a sequential operand that a rank's term would be: where its variables are."""
    part = known
    for dim, (mine, its) in enumerate(zip(known.dims, term.dims, strict=True)):
        if len(mine) != len(its) and mine:
            return None
        if len(mine) != 1:
            continue
        low, high = known.ranges[mine[0]]
        ahead = _distance(_places(table, known.factors, mine[0]), _places(table, term.factors, its[0]))
        start, stop = (collapse(bound + ahead) for bound in term.ranges[its[0]])
        if equal(low, start) and equal(high, stop):
            continue
        if not (everywhere(start >= low) and everywhere(stop <= high)):
            return None
        try:
            part = cut_term(part, dim, collapse(start - low), collapse(stop - low))
        except Undescribed:
            return None
    return table.settle(part)


def _places(table: Table, factors: Sequence[Factor], variable: Variable) -> dict[tuple[int, int], Lane]:
    """At which offsets the tensors that a sum is made of are read along a variable, by tensor and dim."""
    found: dict[tuple[int, int], Lane] = {}
    for factor in factors:
        for place, index in _reads(table, factor):
            if index.terms == ((variable, 1),):
                found[place] = index.offset
    return found


def _reads(table: Table, factor: Factor) -> Iterator[tuple[tuple[int, int], Index]]:
    """Where the tensors that a factor comes down to are read, by tensor and dim."""
    if factor.atom.kind in ("lin", "sum"):
        axes = {-1 - n: index for n, index in enumerate(factor.at)}
        for place, index in _reads_inside(table, factor.atom):
            yield place, substituted(index, axes)
    elif factor.atom.id >= FIRST_ID:
        yield from (((factor.atom.id, n), index) for n, index in enumerate(factor.at))


@spoils
def _reads_inside(table: Table, atom: Atom) -> Sequence[tuple[tuple[int, int], Index]]:
    """The same of a sum, at positions along its axes; those that it sums over are left out. It is kept, as sums share what they
    are made of: there are very many ways down to one tensor."""
    answers = table.answers["reads"]
    known: Sequence[tuple[tuple[int, int], Index]] | None = answers.get(atom.id)
    if known is None:
        found: dict[Hashable, tuple[tuple[int, int], Index]] = {}
        for product in table.definitions[atom].operands[0]:
            for factor in product.factors:
                for place, index in _reads(table, factor):
                    if all(v < 0 for v, _ in index.terms):
                        found.pop((place, index.key), None)  # what comes last counts
                        found[place, index.key] = place, index
        known = answers[atom.id] = tuple(found.values())
    return known


def _distance(known: dict[tuple[int, int], Lane], places: dict[tuple[int, int], Lane]) -> Lane:
    """How far ahead of the one variable the other is: an atom's own positions may begin anywhere."""
    place = min(known.keys() & places.keys(), default=None)
    return 0 if place is None else collapse(places[place] - known[place])
