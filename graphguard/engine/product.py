"""Products of described tensors over labelled dims: elementwise products, contractions, and all in between.

Dims of one label are laid over each other. Where one side has a dim as several variables and the other as one, the one is
split; where both have one, they become one variable, at a distance if their ranges start at different positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from graphguard.engine.lane import Lane, collapse, equal, everywhere, key, varies
from graphguard.engine.monomial import (
    Factor,
    Index,
    Monomial,
    Range,
    Undescribed,
    Variable,
    collected,
    extent,
    mentioned,
    renamed,
    substitute,
    variable_index,
)
from graphguard.engine.table import Table


def product(table: Table, monomials: Sequence[Monomial], labels: Sequence[str], result: str) -> Monomial:
    """As einsum: `product(t, [x, w], ["mk", "kn"], "mn")`. Labels that the result does not have are summed."""
    layout = Layout(table)
    coefficient = Fraction(1)
    for monomial, names in zip(monomials, labels, strict=True):
        coefficient *= monomial.coefficient
        layout.lay(monomial, names)
    dims = tuple(tuple(layout.groups.get(label, ())) for label in result)
    layout.join_points(dims)
    return Monomial(coefficient, collected(layout.factors()), layout.ranges, dims)


class Layout:
    """Monomials over shared variables, while their dims are laid over each other. `parts` are the factors of each."""

    def __init__(self, table: Table):
        self._names = table.names
        self.parts: list[tuple[Factor, ...]] = []
        self.ranges: dict[Variable, Range] = {}
        self.groups: dict[str, list[Variable]] = {}

    def factors(self) -> list[Factor]:
        return [factor for part in self.parts for factor in part]

    def lay(self, monomial: Monomial, labels: str) -> None:
        fresh = renamed(monomial, self._names)
        self.parts.append(fresh.factors)
        self.ranges |= fresh.ranges
        for label, group in zip(labels, fresh.dims, strict=True):
            known = self.groups.get(label)
            self.groups[label] = list(group) if known is None else self._joined(known, list(group))

    def join_points(self, dims: tuple[tuple[Variable, ...], ...]) -> None:
        """Single elements at the same position, which varies with the lane, are one variable: the same head of each factor. In
        one lane that changes nothing; when the ranks are summed later, it is one sum, as the sequential program has it."""
        visible = {variable for dim in dims for variable in dim}
        first: dict[object, Variable] = {}
        same: dict[Variable, Index] = {}
        for variable, (low, high) in self.ranges.items():
            if variable not in visible and varies(low) and equal(high - low, 1):
                known = first.setdefault(key(low), variable)
                if known != variable:
                    same[variable] = variable_index(known)
        self.ranges = {v: span for v, span in self.ranges.items() if v not in same}
        self._substitute(same)

    def _substitute(self, replacements: dict[Variable, Index]) -> None:
        self.parts = [substitute(part, replacements) for part in self.parts]

    def _joined(self, mine: list[Variable], its: list[Variable]) -> list[Variable]:
        """One group of variables for both, from the outermost inwards."""
        mine, its, joined = list(mine), list(its), []
        while mine and its:
            a, b = extent(self.ranges[mine[0]]), extent(self.ranges[its[0]])
            if equal(a, b):
                joined.append(self._identify(mine.pop(0), its.pop(0)))
            elif everywhere(a > b):
                mine[:1] = self.split(mine[0], b)
            elif everywhere(b > a):
                its[:1] = self.split(its[0], a)
            else:
                raise Undescribed("shards of different sizes are laid over each other")
        if mine or its:
            raise Undescribed("dims of different sizes are laid over each other")
        return joined

    def _identify(self, a: Variable, b: Variable) -> Variable:
        """Make two variables of equal extent one. One that nothing mentions has no position of its own and gives way."""
        used = mentioned(self.factors())
        if a not in used:
            a, b = b, a
        distance: Lane = collapse(self.ranges[b][0] - self.ranges[a][0]) if b in used else 0
        self._substitute({b: Index(((a, 1),), distance)})
        del self.ranges[b]
        return a

    def split(self, variable: Variable, outer: Lane) -> list[Variable]:
        """A variable as two, the outer one with the given extent. Aligned ranges keep their global positions."""
        low, high = self.ranges.pop(variable)
        size = collapse(high - low)
        if varies(outer) or varies(size) or size % outer:
            raise Undescribed(f"a range of {size} does not split into {outer} equal parts")
        inner = int(size // outer)
        first, second = next(self._names), next(self._names)
        aligned = everywhere(low % inner == 0)
        start = collapse(low // inner) if aligned else 0
        self.ranges[first], self.ranges[second] = (start, collapse(start + outer)), (0, inner)
        self._substitute({variable: Index(((first, inner), (second, 1)), 0 if aligned else low)})
        return [first, second]
