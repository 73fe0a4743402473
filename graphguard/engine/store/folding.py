"""Sums of products, folded into the sums that the sequential program has.

The sequential run files each sum that it makes. A later product that contains it, whichever way it came about, is folded back
by elimination: for a summed variable, look up the product of the factors that mention it; if it is filed, its atom takes their
place. So the ranks may associate their contractions as they like, and partial sums need no marks: once a range is whole, the
product is the filed one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from graphguard.engine.store.arguments import Ids
from graphguard.engine.store.definitions import What
from graphguard.engine.store.facts import Kind
from graphguard.engine.store.mask_ranges import wider_ranges
from graphguard.engine.store.normal import normal
from graphguard.engine.store.positive import is_not_zero, is_positive
from graphguard.engine.store.records import Records
from graphguard.engine.store.step_counts import counted
from graphguard.engine.terms.definition import Part
from graphguard.engine.terms.lane import Lane, varies
from graphguard.engine.terms.term import (
    ONE,
    Atom,
    Factor,
    Index,
    Range,
    Term,
    Undescribed,
    Variable,
    extent,
    mentioned,
    substituted,
)
from graphguard.graph.exposure import Shown

_SUM: What = ("sum", "sum", (), 1)


class Folding:
    """What the sequential run and that of the ranks do alike."""

    def __init__(self, records: Records):
        self._records = records

    def settle(self, term: Term) -> Term | None:
        """The normal form, with filed sums in place of what they stand for."""
        found = self.simplified(term)
        if found is None:
            return None
        folded = self._fold(found)
        return folded if folded is found else self._cancelled(folded)

    def simplified(self, term: Term) -> Term | None:
        """The normal form, in which every sum stays as it is."""
        found = normal(term, self._records.facts)
        if found is not None and self._records.limits.step_cases:
            counts = counted(self._records, found)
            found = found if counts is found else normal(counts, self._records.facts)
        return None if found is None else self._cancelled(found)

    def _cancelled(self, term: Term) -> Term:
        """The term without what it is multiplied with and divided by, if that is not zero anywhere."""
        for below in term.factors:
            if below.power.numerator > 0 or below.atom.positive or below.atom.kind not in ("sum", "lin"):
                continue
            above = next((f for f in term.factors if f.power > 0 and f.place == below.place), None)
            if above is None or not is_not_zero(self._records, below, term.ranges, term.weight):
                continue
            power = above.power + below.power
            rest = tuple(f for f in term.factors if f is not above and f is not below)
            found = normal(term.with_(factors=(*rest, below._replace(power=power)) if power else rest), self._records.facts)
            assert found is not None
            return self._cancelled(found)
        return term

    def filed(self, term: Term, masks: bool = True) -> Term:
        """The term without sums: an atom for each. Masks, which are sums of deltas over values, may stay open."""
        while pending := [
            v for v in term.summed if not varies(extent(term.ranges[v])) and (masks or not _is_mask(term.factors, v))
        ]:
            inside, bound = connected(term, pending[0], set(pending))
            part = Part((0, ONE), inside, bound)
            atom, axes = self._records.definitions.define(_SUM, [part], term.ranges, **signs(inside))
            self._file(atom, inside, [term.ranges[v] for v in bound])
            term = self._replaced(term, inside, bound, atom, axes)
        return term

    def _file(self, total: Atom, inside: Sequence[Factor], ranges: Sequence[Range]) -> None:
        """Note a sum of products that was given an atom."""

    def _filed_ranges(self, factors: Sequence[Factor]) -> Sequence[Range] | None:
        """The ranges of filed sums of products of the same atoms; None if there is no such sum."""
        return self._records.sums.ranges_of(*_members(factors))

    def _fold(self, term: Term) -> Term:
        summed = term.summed
        while summed:
            folded = self._folded_once(term, summed) or self._continued(term, summed) or self._regrouped(term, summed)
            if folded is None:
                break
            term = folded
            summed = term.summed
        if self._records.over("factors", len(term.factors)):
            raise Undescribed(f"a product of more than {self._records.limits.factors} factors")
        return term

    def _folded_once(self, term: Term, summed: Sequence[Variable]) -> Term | None:
        """The term with a filed sum in place of its members, or with a sum that it is divided by, which cancels."""
        even = {v for v in summed if not varies(extent(term.ranges[v]))}
        divisors = {f.place: f for f in term.factors if f.power.numerator < 0 and f.atom.kind == "sum"}
        for variable in sorted(summed):
            inside = tuple(f for f in term.factors if variable in f.variables())
            whole = self._whole_part(term, inside, variable)
            if whole is not None:
                return whole
            spans = self._filed_ranges(inside)
            if spans is None and not divisors:
                continue
            outside = mentioned(f for f in term.factors if variable not in f.variables())
            for ranges in [term.ranges, *wider_ranges(inside, term.ranges, variable, spans or ())]:
                same = even if ranges is term.ranges else even | {variable}
                if variable not in same:
                    continue
                closed = tuple(sorted(v for v in mentioned(inside) if v in same and v not in outside))
                for bound in ((variable,), closed) if len(closed) > 1 else ((variable,),):
                    found = self._find(inside, bound, ranges)
                    if found is None:
                        continue
                    divisor = divisors.get(Factor(*found).place)
                    if self._records.sums.is_filed(found[0]) or (
                        divisor and is_positive(self._records, divisor, ranges, term.weight)
                    ):
                        return self._replaced(term, inside, bound, *found)
        return self._folded_chain(term, even) if len(even) > 1 else None

    def _continued(self, term: Term, summed: Sequence[Variable]) -> Term | None:
        """Sums that go on from each other, as those of microbatches that are added up do, as one sum over all of it."""
        for variable in summed:
            inside = [f for f in term.factors if variable in f.variables()]
            if len(inside) != 1 or inside[0].atom.kind != "sum" or inside[0].power != 1:
                continue
            strides = {abs(stride) for index in inside[0].at for v, stride in index.terms if v == variable}
            (member,) = self._records.definitions[inside[0].atom].operands[0]
            if not strides & set(member.extents) - {1}:
                continue
            members, ranges = self._members(inside[0])
            kept = [f for f in term.factors if f is not inside[0]]
            found = normal(term.with_(factors=(*kept, *members), ranges={**term.ranges, **ranges}), self._records.facts)
            if found is not None and len(found.summed) < len(summed) + len(ranges):
                return found
        return None

    def _folded_chain(self, term: Term, even: set[Variable]) -> Term | None:
        """A filed sum over several variables at once, no one of which is in all of its factors."""
        left = set(even)
        while left:
            inside, bound = connected(term, min(left), even)
            left -= set(bound)
            if len(bound) < 2 or self._filed_ranges(inside) is None:
                continue
            found = self._find(inside, bound, term.ranges)
            if found is not None and self._records.sums.is_filed(found[0]):
                return self._replaced(term, inside, bound, *found)
        return None

    def _regrouped(self, term: Term, summed: Sequence[Variable]) -> Term | None:
        """The term with its sums in another order, one less of them, if the sequential program has that order."""
        return None

    def _whole_part(self, term: Term, inside: tuple[Factor, ...], variable: Variable) -> Term | None:
        """The sum of all parts of a tensor is the tensor."""
        if len(inside) != 1 or inside[0].power != 1:
            return None
        whole = self._records.sums.whole_of(inside[0].atom)
        if whole is None or not whole.is_summed(inside[0], variable, term.ranges):
            return None
        return self._with(
            term.with_(coefficient=term.coefficient * whole.coefficient), inside, (variable,), whole.read_at(inside[0].at)
        )

    def _members(self, factor: Factor) -> tuple[list[Factor], dict[Variable, Range]]:
        """What a sum is a sum of products of, read where it is, and the ranges of the variables that it binds."""
        (member,) = self._records.definitions[factor.atom].operands[0]
        names: dict[int, Index] = {-1 - n: index for n, index in enumerate(factor.at)}
        ranges: dict[Variable, Range] = {}
        for number, size in enumerate(member.extents):
            variable = next(self._records.names)
            names[number], ranges[variable] = Index(((variable, 1),)), (0, size)
        return [f._replace(at=tuple(substituted(i, names) for i in f.at)) for f in member.factors], ranges

    def _replaced(
        self, term: Term, inside: tuple[Factor, ...], bound: Iterable[Variable], atom: Atom, axes: tuple[Index, ...]
    ) -> Term:
        return self._with(term, inside, bound, (Factor(atom, axes),))

    def _with(self, term: Term, inside: Sequence[Factor], bound: Iterable[Variable], factors: tuple[Factor, ...]) -> Term:
        """The term with these factors in place of others and of sums over bound variables."""
        gone = {id(factor) for factor in inside}
        kept = tuple(factor for factor in term.factors if id(factor) not in gone)
        ranges = {v: span for v, span in term.ranges.items() if v not in bound}
        found = normal(term.with_(factors=(*kept, *factors), ranges=ranges), self._records.facts)
        assert found is not None
        return found

    def _find(
        self, inside: tuple[Factor, ...], bound: tuple[Variable, ...], ranges: Mapping[Variable, Range]
    ) -> tuple[Atom, tuple[Index, ...]] | None:
        """The atom of a sum of products, if there is one."""
        return self._records.definitions.find(_SUM, [Part((0, ONE), inside, bound)], ranges)


class SequentialRun(Folding):
    """Files every sum that it makes. What its operations need is taken to hold: the program is taken to be defined."""

    def settle(self, term: Term) -> Term | None:
        found = super().settle(term)
        return None if found is None else self.filed(found, masks=False)

    def _file(self, total: Atom, inside: Sequence[Factor], ranges: Sequence[Range]) -> None:
        known = tuple([each for each in ranges if not any(varies(end) for end in each)])
        self._records.sums.file_sum(total, *_members(inside), known)

    def need(self, kind: Kind, factor: Factor, ranges: Mapping[Variable, Range], weight: Lane, shown: Shown) -> None:
        self._records.facts.note(kind, factor, ranges, shown)


class RanksRun(Folding):
    """Reads what is filed, in any order of sums. What its operations need has to be shown."""

    def need(self, kind: Kind, factor: Factor, ranges: Mapping[Variable, Range], weight: Lane, shown: Shown) -> None:
        self._records.needs.note(kind, factor, ranges, weight)

    def _regrouped(self, term: Term, summed: Sequence[Variable]) -> Term | None:
        """Σ_i a_i (Σ_h b_ih c_h) as Σ_h (Σ_i a_i b_ih) c_h, where the sequential program has that pair. A rank that holds a
        part of the i can only sum over h; once a reduction has all i, the order is free. One sum less must be left."""
        for variable in sorted(summed):
            inside = [f for f in term.factors if variable in f.variables()]
            if len(inside) < 2 or any(varies(end) for end in term.ranges[variable]):
                continue
            for factor in inside:
                opened = self._with_opened(term, inside, factor, variable)
                if opened is None:
                    continue
                found = self._folded_once(opened, [v for v in opened.summed if v in term.ranges])
                while found is not None and len(found.summed) >= len(summed):
                    found = self._folded_once(found, found.summed)
                if found is not None:
                    return found
        return None

    def _with_opened(self, term: Term, inside: Sequence[Factor], factor: Factor, variable: Variable) -> Term | None:
        """The term with the members of a sum in place of it, if those that mention the variable are in a filed sum with what
        else mentions it."""
        if factor.atom.kind != "sum" or factor.power != 1:
            return None
        members, ranges = self._members(factor)
        spans = self._filed_ranges([f for f in inside if f is not factor] + [f for f in members if variable in f.variables()])
        if spans is None or term.ranges[variable] not in spans:
            return None
        kept = [f for f in term.factors if f is not factor]
        return normal(term.with_(factors=(*kept, *members), ranges={**term.ranges, **ranges}), self._records.facts)


def connected(term: Term, start: Variable, pending: set[Variable]) -> tuple[tuple[Factor, ...], tuple[Variable, ...]]:
    """The factors that hang together with a summed variable through summed variables, and those variables."""
    variables = {start}
    while True:
        inside = tuple(f for f in term.factors if variables & set(f.variables()))
        grown = variables | (mentioned(inside) & pending)
        if grown == variables:
            return inside, tuple(sorted(variables))
        variables = grown


def _members(factors: Sequence[Factor]) -> tuple[Ids, tuple[Fraction, ...]]:
    return Ids([f.atom.id for f in factors]), tuple([f.power for f in factors])


def _is_mask(factors: tuple[Factor, ...], variable: Variable) -> bool:
    """Whether a variable only says which values a delta accepts."""
    inside = [f for f in factors if variable in f.variables()]
    return len(inside) == 1 and inside[0].atom.kind == "delta" and inside[0].at[-1].terms == ((variable, 1),)


def signs(factors: Iterable[Factor]) -> dict[str, bool]:
    """What is known of the sign of a product."""
    nonnegative = [f.atom.nonnegative or (f.power % 2 == 0 and f.power > 0) for f in factors]
    return {"positive": all(f.atom.positive for f in factors), "nonnegative": all(nonnegative)}
