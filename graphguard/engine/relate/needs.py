"""Whether what the ranks alone do is defined where they do it.

The claim of a proof is made wherever the sequential program is defined. So what the ranks alone do has to be defined there:
its operand is known to lie in the domain, or the sequential program does the same with all of these values. What is neither
is a condition of the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from fractions import Fraction

from graphguard.engine.algebra.domain import ABOVE, FROM, NOT_ZERO_TEXT, Domain, domain_of
from graphguard.engine.algebra.function import instance
from graphguard.engine.algebra.infinities import may_be_masked_out
from graphguard.engine.store.enclosure import interval_of
from graphguard.engine.store.facts import Kind
from graphguard.engine.store.interval import ABOVE_ZERO, FROM_ZERO, Interval, exactly
from graphguard.engine.store.need import DEFINED, NOT_NEGATIVE, NOT_ZERO, Need
from graphguard.engine.store.positive import is_positive_there
from graphguard.engine.store.table import Table
from graphguard.engine.terms.definition import Definition
from graphguard.engine.terms.term import ONE, Atom, Factor, Index

_OF_ONE = frozenset({
    "div", "reciprocal", "log", "log2", "log10", "sqrt", "rsqrt", "pow", "asin", "acos", "acosh", "atanh", "tan", "lgamma",
    "remainder", "fmod", "floor_divide",
})  # fmt: skip


class Needs:
    """What the ranks need that is not known to hold."""

    def __init__(self, table: Table):
        self._table = table
        self._known: dict[Hashable, bool] = {}

    def unmet(self, needs: Sequence[Need]) -> Iterator[Need]:
        """The needs that are not known to be met, each once."""
        seen: set[Hashable] = set()
        for need in needs:
            if not self.is_met(need) and need.key not in seen:
                seen.add(need.key)
                yield need

    def is_met(self, need: Need) -> bool:
        key = need.key
        if key not in self._known:
            self._known[key] = False  # while it is looked at
            self._known[key] = self._table.facts.holds(need.kind, need.factor, need.ranges) or self._holds(need)
        return self._known[key]

    def _holds(self, need: Need) -> bool:
        if need.kind == NOT_ZERO:
            return self._is_not_zero(need)
        if need.kind == NOT_NEGATIVE:
            return need.factor.atom.nonnegative or self._span(need).within(FROM_ZERO)
        found = _domain(self._table, need.factor.atom)
        if found is None:
            return False
        domain, definition = found
        axes: dict[int, Index] = {-1 - n: index for n, index in enumerate(need.factor.at)}
        products = definition.operands[domain.operand]
        if not products:  # zero; its log is an infinity, which is never cancelled
            return definition.name == "log" or (domain.allowed is not None and exactly(Fraction(0)).within(domain.allowed))
        (product,) = products
        return self._lies_in(domain, product.label[1], instance(product, axes), need, definition.name == "log")  # type: ignore[index]

    def _lies_in(self, domain: Domain, coefficient: Fraction, factors: Sequence[Factor], need: Need, log: bool) -> bool:
        """Whether a product is in a domain wherever it is read. Where a mask makes what a log is of zero, the log is an
        infinity, which is never cancelled."""
        if domain.allowed is None:
            return all(self._factor_is(NOT_ZERO, each, need) for each in factors if each.power > 0)
        span = interval_of(self._table, coefficient, factors, need.ranges)
        if span.within(domain.allowed):
            return True
        if log and span.within(FROM_ZERO) and all(may_be_masked_out(self._table, f.atom) for f in factors):
            return True
        if domain.allowed not in (ABOVE_ZERO, FROM_ZERO) or coefficient <= 0:
            return False
        above = [f for f in factors if domain.allowed is ABOVE_ZERO and not (log and may_be_masked_out(self._table, f.atom))]
        if log:
            above = [f for f in above if not self._table.facts.holds("logged", f, need.ranges)]
        return all(self._is_from_zero(f, need) for f in factors) and all(self._factor_is(NOT_ZERO, f, need) for f in above)

    def _is_from_zero(self, factor: Factor, need: Need) -> bool:
        return factor.power.denominator != 1 or factor.power % 2 == 0 or self._factor_is(NOT_NEGATIVE, factor, need)

    def _factor_is(self, kind: Kind, factor: Factor, need: Need) -> bool:
        return self.is_met(need._replace(kind=kind, factor=factor))

    def _is_not_zero(self, need: Need) -> bool:
        factor = need.factor
        if factor.atom.positive or is_positive_there(self._table, factor, need.ranges, need.weight):
            return True
        if not self._span(need).has_zero():
            return True
        definition = self._table.definitions.get(factor.atom)
        if definition is None or definition.name not in ("abs", "exp") or not definition.operands[0]:
            return False
        (product,) = definition.operands[0]
        inside = instance(product, {-1 - n: index for n, index in enumerate(factor.at)})
        if definition.name == "exp":  # which is zero of minus infinity alone
            return interval_of(self._table, product.label[1], inside, need.ranges).low > -math.inf  # type: ignore[index]
        return all(self._factor_is(NOT_ZERO, each, need) for each in inside if each.power > 0)

    def _span(self, need: Need) -> Interval:
        return interval_of(self._table, Fraction(1), [need.factor._replace(power=Fraction(1))], need.ranges)


def _domain(table: Table, atom: Atom) -> tuple[Domain, Definition] | None:
    """Where a function is defined; None of an operator of which that is not known."""
    definition = table.definitions.get(atom)
    if definition is None or atom.kind != "function":
        return None
    domain = domain_of(definition.name, definition.parameters)
    return None if domain is None else (domain, definition)


def in_words(table: Table, needs: Sequence[Need], names: Mapping[int, str], operator: str) -> list[str]:
    """Conditions for people: of inputs by their names, else of the operand of an operator."""
    keys = {need.key for need in needs}
    both = [{need._replace(kind=kind).key for kind in (NOT_ZERO, NOT_NEGATIVE)} for need in needs]
    texts = [
        _in_words(table, need, names, operator, positive=need.kind != DEFINED and pair <= keys)
        for need, pair in zip(needs, both, strict=True)
    ]
    return list(dict.fromkeys(texts))


def _in_words(table: Table, need: Need, names: Mapping[int, str], operator: str, positive: bool) -> str:
    atom = need.factor.atom
    shown = f"a value in {operator}" if operator not in _OF_ONE else f"the operand of {operator}"
    if need.kind != DEFINED:
        text = ABOVE.text if positive else NOT_ZERO_TEXT if need.kind == NOT_ZERO else FROM.text
        return text.format(_expression(table, ONE, [Factor(atom, ())], names) or shown)
    found = _domain(table, atom)
    if found is None:
        return f"{operator} is defined"
    domain, definition = found
    products = definition.operands[domain.operand]
    known = [_expression(table, product.label[1], product.factors, names) for product in products]  # type: ignore[index]
    return domain.text.format(known[0] if len(known) == 1 and known[0] else shown)


def _expression(table: Table, coefficient: Fraction, factors: Sequence[Factor], names: Mapping[int, str]) -> str | None:
    """A product, or a sum of few, of inputs alone; None of others. Positions are not said."""
    if any(factor.power != 1 for factor in factors) or len(factors) > 2:
        return None
    if len(factors) == 1 and factors[0].atom.kind == "lin" and abs(coefficient) == 1:
        products = table.definitions[factors[0].atom].operands[0]
        parts = [_expression(table, coefficient * p.label[1], p.factors, names) for p in products]  # type: ignore[index]
        known = sorted((part for part in parts if part is not None), key=lambda part: part.startswith("-"))
        return " + ".join(known).replace("+ -", "- ") if len(known) == len(parts) <= 3 else None
    words = [names.get(factor.atom.id) for factor in factors]
    if not all(words):
        return None
    number = "" if abs(coefficient) == 1 and words else f"{float(abs(coefficient)):g}"
    return ("-" if coefficient < 0 else "") + " ".join([*filter(None, [number]), *filter(None, words)])
