"""Atoms that are parts of something: their sum over all members is a product that is known.

    Σ_k P[16 k, t, h]  is  1/8 · S[t, h]      k in [0, 2),  t in [0, 64),  h in [0, 32)

It says nothing of one member alone. So what a rank holds of a sum can go through everything that is linear as one thing, and
is the sequential program's once a reduction has summed over the members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from graphguard.engine.terms.lane import equal, everywhere
from graphguard.engine.terms.term import Atom, Factor, Index, Range, Variable, bounds, extent, substitute


class Axis(NamedTuple):
    """Where a part is read: member k at first + step k; or, if there is no step, from first to last, which None leaves open."""

    first: int
    last: int | None
    step: int = 0

    def is_met(self, index: Index, member: Variable, ranges: Mapping[Variable, Range]) -> bool:
        low, high = bounds(index, ranges)
        if self.step:
            return index.terms == ((member, self.step),) and equal(low if self.step > 0 else high, self.first)
        inside = self.last is None or (everywhere(low >= self.first) and everywhere(high <= self.last))
        return inside and all(variable != member for variable, _ in index.terms)


class Whole(NamedTuple):
    """What a part is a part of. Axis n of the part is the variable -1 - n of the factors."""

    members: int
    axes: tuple[Axis, ...]
    coefficient: Fraction
    factors: tuple[Factor, ...]

    @property
    def form(self) -> object:
        """All but the atoms."""
        return self.members, self.axes, self.coefficient, [(factor.at, factor.power) for factor in self.factors]

    @property
    def atoms(self) -> list[Atom]:
        return [factor.atom for factor in self.factors]

    def of(self, atoms: Sequence[Atom]) -> Whole:
        return self._replace(factors=tuple(f._replace(atom=a) for f, a in zip(self.factors, atoms, strict=True)))

    def is_summed(self, part: Factor, variable: Variable, ranges: Mapping[Variable, Range]) -> bool:
        """Whether a sum over a variable is the sum over all members, at positions of which this is known."""
        if not equal(extent(ranges[variable]), self.members):
            return False
        return all(axis.is_met(index, variable, ranges) for index, axis in zip(part.at, self.axes, strict=True))

    def read_at(self, at: Sequence[Index]) -> tuple[Factor, ...]:
        return substitute(self.factors, {-1 - axis: index for axis, index in enumerate(at)})
