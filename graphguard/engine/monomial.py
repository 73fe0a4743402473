"""Products of powers of atoms over ranges of variables: the words in which the engine describes tensors.

    coefficient · Σ_k x[i, k] · A[k, j]        i in [0, 8), j in [16 r, 16 r + 16), k in [0, 16)

A variable is a global position: it has no size, only a range, which may differ from lane to lane. The variables in `dims`
are the tensor's own, outermost first, several to a dim where a reshape joined them; every other variable is summed over its
range. A variable of `dims` that no factor mentions is a broadcast. A summed variable with one element is just that element:
what is left of a dim of local size 1, such as the one head of a rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from graphguard.engine.lane import Lane, collapse, equal, key

Variable = int
Range = tuple[Lane, Lane]
MOST_ORDERS = 24  # of factors that are alike, tried to find the canonical one


class Undescribed(Exception):
    """A result that has no description in this form; the reason is for people."""


class Atom(NamedTuple):
    """A lane-free tensor. Atoms of one table are equal exactly if their ids are."""

    id: int
    kind: str
    definition: Hashable

    def __repr__(self) -> str:
        return f"{self.kind}{self.id}"


class Index(NamedTuple):
    """A position: an offset plus multiples of variables, the largest stride first."""

    terms: tuple[tuple[Variable, int], ...]
    offset: Lane = 0


class Factor(NamedTuple):
    atom: Atom
    at: tuple[Index, ...]
    power: Fraction = Fraction(1)

    def variables(self) -> Iterator[Variable]:
        for index in self.at:
            for variable, _ in index.terms:
                yield variable


@dataclass(frozen=True)
class Monomial:
    coefficient: Fraction
    factors: tuple[Factor, ...]
    ranges: Mapping[Variable, Range]
    dims: tuple[tuple[Variable, ...], ...]

    @property
    def summed(self) -> tuple[Variable, ...]:
        visible = {variable for dim in self.dims for variable in dim}
        return tuple(variable for variable in self.ranges if variable not in visible)

    def is_point(self, variable: Variable) -> bool:
        """Whether the variable has exactly one element, in every lane."""
        low, high = self.ranges[variable]
        return equal(high - low, 1)


def variable_index(variable: Variable) -> Index:
    return Index(((variable, 1),))


def mentioned(factors: Iterable[Factor]) -> set[Variable]:
    return {variable for factor in factors for variable in factor.variables()}


def extent(span: Range) -> Lane:
    low, high = span
    return collapse(high - low)


def substitute(factors: Iterable[Factor], replacements: Mapping[Variable, Index]) -> tuple[Factor, ...]:
    """The factors with some variables replaced by positions."""
    return tuple(
        Factor(factor.atom, tuple(_substituted(index, replacements) for index in factor.at), factor.power) for factor in factors
    )


def _substituted(index: Index, replacements: Mapping[Variable, Index]) -> Index:
    strides: dict[Variable, int] = {}
    offset = index.offset
    for variable, stride in index.terms:
        replacement = replacements.get(variable) or variable_index(variable)
        offset = offset + stride * replacement.offset
        for inner, inner_stride in replacement.terms:
            strides[inner] = strides.get(inner, 0) + stride * inner_stride
    terms = sorted(((v, s) for v, s in strides.items() if s), key=lambda term: (-term[1], term[0]))
    return Index(tuple(terms), collapse(offset))


def renamed(monomial: Monomial, names: Iterator[Variable]) -> Monomial:
    """The same with new variables, so that two uses of one description do not share theirs."""
    new = {variable: next(names) for variable in monomial.ranges}
    return Monomial(
        monomial.coefficient,
        substitute(monomial.factors, {old: variable_index(variable) for old, variable in new.items()}),
        {new[variable]: span for variable, span in monomial.ranges.items()},
        tuple(tuple(new[variable] for variable in dim) for dim in monomial.dims),
    )


def collected(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    """Equal atoms at equal positions as one power. Opposite powers stay apart: they cancel only where the atom is not zero."""
    powers: dict[tuple[Hashable, ...], Factor] = {}
    for factor in factors:
        sign = factor.power > 0
        place = (factor.atom.id, sign, *((index.terms, key(index.offset)) for index in factor.at))
        known = powers.get(place)
        powers[place] = factor if known is None else factor._replace(power=known.power + factor.power)
    return tuple(powers.values())


class Canonical(NamedTuple):
    """What products are, whatever their variables are called: equal keys, equal products. `order` numbers the variables."""

    key: Hashable
    order: tuple[Variable, ...]


Part = tuple[Hashable, tuple[Factor, ...], tuple[Variable, ...]]  # a label, factors, and the variables summed over them


def canonical(factors: Iterable[Factor], summed: Iterable[Variable], ranges: Mapping[Variable, Range]) -> Canonical:
    """The canonical form of one product."""
    return canonical_together([((), tuple(factors), tuple(summed))], ranges)


def canonical_together(parts: Sequence[Part], ranges: Mapping[Variable, Range]) -> Canonical:
    """The canonical form of several products that share variables. Variables are numbered in the order in which the sorted
    parts and factors mention them; of those that are alike, in the order that gives the smallest key. Past a cap on the
    orders tried, equal products may get different keys, never the reverse."""
    best: tuple[str, Canonical] | None = None
    for arrangement in _arrangements(parts):
        numbers: dict[Variable, int] = {}
        shape = []
        for label, factors, summed in arrangement:
            positions = tuple(_numbered(factor, numbers) for factor in factors)
            sums = tuple(sorted((numbers[v], key(ranges[v][0]), key(ranges[v][1])) for v in summed if v in numbers))
            shape.append((label, positions, sums))
        candidate = Canonical(tuple(shape), tuple(numbers))
        rank = repr(candidate.key)
        if best is None or rank < best[0]:
            best = rank, candidate
    assert best is not None
    return best[1]


def _numbered(factor: Factor, numbers: dict[Variable, int]) -> Hashable:
    positions = tuple(
        (tuple((numbers.setdefault(variable, len(numbers)), stride) for variable, stride in index.terms), key(index.offset))
        for index in factor.at
    )
    return factor.atom.id, factor.power, positions


def _likeness(factor: Factor) -> tuple[int, Fraction]:
    return factor.atom.id, factor.power


def _arrangements(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """The orders of parts, and of the factors in each, that the labels and atoms leave open."""
    arranged = [(label, tuple(sorted(factors, key=_likeness)), summed) for label, factors, summed in parts]

    def alike(part: Part) -> str:
        return repr((part[0], [_likeness(factor) for factor in part[1]]))

    groups = [list(group) for _, group in itertools.groupby(sorted(arranged, key=alike), alike)]
    runs = [[list(run) for _, run in itertools.groupby(part[1], _likeness)] for group in groups for part in group]
    count = math.prod(math.factorial(len(group)) for group in groups)
    count *= math.prod(math.factorial(len(run)) for part in runs for run in part)
    if count > MOST_ORDERS:
        yield [part for group in groups for part in group]
        return
    for order in itertools.product(*(itertools.permutations(group) for group in groups)):
        chosen = [part for group in order for part in group]
        for factors in itertools.product(*(_orders(part[1]) for part in chosen)):
            yield [(label, inner, summed) for (label, _, summed), inner in zip(chosen, factors, strict=True)]


def _orders(factors: tuple[Factor, ...]) -> Iterator[tuple[Factor, ...]]:
    runs = [list(run) for _, run in itertools.groupby(factors, _likeness)]
    for order in itertools.product(*(itertools.permutations(run) for run in runs)):
        yield tuple(factor for run in order for factor in run)
