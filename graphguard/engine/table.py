"""The atoms of one proof, and the products that are filed under them.

The sequential run files each sum that it makes. A later product that contains it, whichever way it came about, is folded back
by elimination: for a summed variable, look up the product of the factors that mention it; if it is filed, its atom takes
their place. So the ranks may associate their contractions as they like, and partial sums need no marks: once a range is
whole, the product is the filed one.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from fractions import Fraction
from typing import TYPE_CHECKING

from graphguard.engine.lane import varies
from graphguard.engine.monomial import (
    Atom,
    Factor,
    Index,
    Monomial,
    Range,
    Undescribed,
    Variable,
    canonical,
    extent,
    mentioned,
    variable_index,
)

if TYPE_CHECKING:
    from graphguard.engine.function import Function


class Table:
    def __init__(self) -> None:
        self._atoms: dict[tuple[str, Hashable], Atom] = {}
        self._filed: dict[Hashable, Atom] = {}
        self.sums: dict[int, tuple[tuple[Factor, ...], dict[Variable, Range], tuple[Variable, ...]]] = {}
        self.functions: dict[int, Function] = {}
        self.names = itertools.count()

    def atom(self, kind: str, definition: Hashable) -> Atom:
        """The one atom of this definition."""
        known = self._atoms.get((kind, definition))
        if known is None:
            known = self._atoms[kind, definition] = Atom(len(self._atoms), kind, definition)
        return known

    def input(self, name: str, shape: tuple[int, ...]) -> Monomial:
        """A whole sequential input."""
        variables = tuple(next(self.names) for _ in shape)
        factor = Factor(self.atom("input", (name, shape)), tuple(variable_index(v) for v in variables))
        ranges: dict[Variable, Range] = {v: (0, size) for v, size in zip(variables, shape, strict=True)}
        return Monomial(Fraction(1), (factor,), ranges, tuple((v,) for v in variables))

    def fold(self, monomial: Monomial) -> Monomial:
        """The same tensor, with filed sums in place of what they stand for."""
        monomial = _without_idle_sums(monomial)
        while (folded := self._folded_once(monomial)) is not None:
            monomial = folded
        return monomial

    def file(self, monomial: Monomial) -> Monomial:
        """Fold, and make an atom of each sum that is left: what the sequential run does with every result."""
        monomial = self.fold(monomial)
        while pending := [v for v in monomial.summed if not monomial.is_point(v)]:
            inside, variables = _connected(monomial, pending[0], set(pending))
            form = canonical(inside, variables, monomial.ranges)
            atom = self.atom("sum", form.key)
            self._filed[form.key] = atom
            self.sums[atom.id] = inside, {v: monomial.ranges[v] for v in variables}, _free(form.order, variables)
            monomial = _replaced(monomial, inside, variables, atom, _free(form.order, variables))
        return monomial

    def _folded_once(self, monomial: Monomial) -> Monomial | None:
        pending = {v for v in monomial.summed if not monomial.is_point(v) and not any(map(varies, monomial.ranges[v]))}
        for variable in sorted(pending):
            inside = tuple(f for f in monomial.factors if variable in f.variables())
            outside = mentioned(f for f in monomial.factors if variable not in f.variables())
            variables = {v for v in mentioned(inside) if v in pending and v not in outside}
            form = canonical(inside, variables, monomial.ranges)
            atom = self._filed.get(form.key)
            if atom is not None:
                return _replaced(monomial, inside, variables, atom, _free(form.order, variables))
        return None


def _free(order: tuple[Variable, ...], summed: set[Variable]) -> tuple[Variable, ...]:
    return tuple(v for v in order if v not in summed)


def _replaced(
    monomial: Monomial, inside: tuple[Factor, ...], summed: set[Variable], atom: Atom, free: tuple[Variable, ...]
) -> Monomial:
    gone = {id(factor) for factor in inside}
    kept = tuple(factor for factor in monomial.factors if id(factor) not in gone)
    ranges = {v: span for v, span in monomial.ranges.items() if v not in summed}
    index: tuple[Index, ...] = tuple(variable_index(v) for v in free)
    return Monomial(monomial.coefficient, (*kept, Factor(atom, index)), ranges, monomial.dims)


def _connected(monomial: Monomial, start: Variable, pending: set[Variable]) -> tuple[tuple[Factor, ...], set[Variable]]:
    """The factors that hang together with a summed variable through summed variables, and those variables."""
    variables = {start}
    while True:
        inside = tuple(f for f in monomial.factors if variables & set(f.variables()))
        grown = variables | (mentioned(inside) & pending)
        if grown == variables:
            return inside, variables
        variables = grown


def _without_idle_sums(monomial: Monomial) -> Monomial:
    """A sum over a variable that nothing mentions counts its elements."""
    used = mentioned(monomial.factors)
    idle = [v for v in monomial.summed if v not in used]
    coefficient = monomial.coefficient
    for variable in idle:
        size = extent(monomial.ranges[variable])
        if not isinstance(size, int):
            raise Undescribed("a sum over a repeated dim whose size differs between lanes")
        coefficient *= size
    ranges = {v: span for v, span in monomial.ranges.items() if v not in idle}
    return Monomial(coefficient, monomial.factors, ranges, monomial.dims)
