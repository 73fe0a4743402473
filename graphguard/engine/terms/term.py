"""The words in which the engine describes tensors: sums of products of atoms over ranges of variables.

    coefficient · weight · Σ_k x[i, k] · A[k, j]        i in [0, 8), j in [16 r, 16 r + 16), k in [0, 16)

An atom is a lane-free tensor: a function from positions to numbers. A variable stands for a position; it has a range, which may
differ from lane to lane. The variables in `dims` are the tensor's own, outermost first, several to a dim where a reshape joined
them; every other variable is summed over its range. A variable of `dims` that no factor mentions is a broadcast. A term covers
a box of the local tensor and counts as zero outside.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from graphguard.engine.terms.lane import Lane, collapse, everywhere, key, varies

Variable = int
Range = tuple[Lane, Lane]
ONE = Fraction(1)


class Undescribed(Exception):
    """A result that has no description in this form; the reason is for people."""


class CutThroughRows(Undescribed):
    """A part of a term that begins or ends within rows of joined dims: it takes several terms."""


class Atom:
    """A lane-free tensor. `positive`, `nonnegative` and `indicator` (0 or 1) are known facts about all of its elements."""

    __slots__ = ("id", "indicator", "kind", "nonnegative", "number", "positive")

    def __init__(self, id: int, kind: str, positive: bool = False, nonnegative: bool = False, indicator: bool = False):
        self.id, self.kind, self.positive, self.indicator = id, kind, positive, indicator
        self.nonnegative = nonnegative or positive or indicator
        self.number: Fraction | None = None  # of an atom that is one number, for its roots

    def __repr__(self) -> str:
        return f"{self.kind}{self.id}"


IDX = Atom(0, "idx")  # idx[i] is i
IMPULSE = Atom(1, "impulse", indicator=True)  # 1 at 0, else 0
STEP = Atom(2, "step", indicator=True)  # 1 above 0, else 0
WINDOW = Atom(4, "window", indicator=True)  # a step that says where a piece lies: it becomes a box or a range where it can
DIMS = Atom(3, "dims", positive=True)  # 1 everywhere: names the order of dims in a definition
SPECIAL = (IDX, IMPULSE, STEP, WINDOW, DIMS)
FIRST_ID = 8  # of the atoms of a table


class Index(NamedTuple):
    """A position: multiples of variables, the largest stride first, plus an offset."""

    terms: tuple[tuple[Variable, int], ...]
    offset: Lane = 0

    @property
    def key(self) -> Hashable:
        return self.terms, key(self.offset)


class Factor(NamedTuple):
    atom: Atom
    at: tuple[Index, ...]
    power: Fraction = ONE

    def variables(self) -> Iterator[Variable]:
        for index in self.at:
            for variable, _ in index.terms:
                yield variable

    @property
    def place(self) -> tuple[Hashable, ...]:
        """Equal for the same atom at the same position."""
        return self.atom.id, *(index.key for index in self.at)


@dataclass(frozen=True, slots=True)
class Term:
    coefficient: Fraction
    factors: tuple[Factor, ...]
    ranges: Mapping[Variable, Range]
    dims: tuple[tuple[Variable, ...], ...]
    box: tuple[Range, ...]
    weight: Lane = 1  # multiplies the coefficient, lane by lane; 0 where a lane has no share

    def with_(self, **changes: Any) -> Term:
        old = {name: getattr(self, name) for name in ("coefficient", "factors", "ranges", "dims", "box", "weight")}
        return Term(**(old | changes))

    @property
    def visible(self) -> set[Variable]:
        return {variable for dim in self.dims for variable in dim}

    @property
    def summed(self) -> list[Variable]:
        visible = self.visible
        return [variable for variable in self.ranges if variable not in visible]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor as a sum of terms. Boxes are in local positions, ranges and indices in global ones."""

    shape: tuple[Lane, ...]
    terms: tuple[Term, ...]


def variable_index(variable: Variable) -> Index:
    return Index(((variable, 1),))


def mentioned(factors: Iterable[Factor]) -> set[Variable]:
    return {variable for factor in factors for variable in factor.variables()}


def extent(span: Range) -> Lane:
    return collapse(span[1] - span[0])


def stride_order(term: tuple[Variable, int]) -> tuple[int, int, Variable]:
    return -abs(term[1]), -term[1], term[0]


def scaled(index: Index, stride: int) -> Index:
    return Index(tuple((v, s * stride) for v, s in index.terms), collapse(index.offset * stride))


def combined(parts: Iterable[Index]) -> Index:
    """The sum of positions."""
    strides: dict[Variable, int] = {}
    offset: Lane = 0
    for part in parts:
        offset = offset + part.offset
        for variable, stride in part.terms:
            strides[variable] = strides.get(variable, 0) + stride
    terms = [(v, s) for v, s in strides.items() if s]
    if len(terms) > 1:
        terms.sort(key=stride_order)
    return Index(tuple(terms), collapse(offset))


def substitute(factors: Iterable[Factor], replacements: Mapping[Variable, Index]) -> tuple[Factor, ...]:
    """The factors with some variables replaced by positions."""
    result = []
    for factor in factors:
        if any(v in replacements for v in factor.variables()):
            factor = Factor(factor.atom, tuple(substituted(index, replacements) for index in factor.at), factor.power)
        result.append(factor)
    return tuple(result)


def substituted(index: Index, replacements: Mapping[Variable, Index]) -> Index:
    if not any(v in replacements for v, _ in index.terms):
        return index
    parts = [Index((), index.offset)]
    parts += [scaled(replacements[v], s) if v in replacements else Index(((v, s),)) for v, s in index.terms]
    return combined(parts)


def bounds(index: Index, ranges: Mapping[Variable, Range]) -> Range:
    """The smallest and the largest position that an index takes, inclusive."""
    low = high = index.offset
    for variable, stride in index.terms:
        first, last = ranges[variable][0], ranges[variable][1] - 1
        low, high = (low + stride * first, high + stride * last) if stride > 0 else (low + stride * last, high + stride * first)
    return collapse(low), collapse(high)


def weighted(term: Term) -> tuple[Factor, ...]:
    """The factors, with a weight that varies as a factor: idx at the weight is the weight."""
    if not varies(term.weight):
        return term.factors
    if not everywhere(term.weight != 0):  # what is said of lanes without a share is void
        raise Undescribed("a function of what only some ranks hold")
    return (*term.factors, Factor(IDX, (Index((), term.weight),)))
