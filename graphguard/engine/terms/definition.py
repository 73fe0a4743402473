"""Lane-free definitions. What a term says at its positions becomes an atom over axes, one for each different position in it.

    Σ_k x[i, 4 r + k] · W[4 r + k, j]   is   S[i, 4 r, j]   where   S[a, b, c] = Σ_k x[a, b + k] · W[b + k, c]   and k in [0, 4)

All that may differ between lanes is in the positions at which the atom is read. So two products are the same atom if they are
put together alike, whatever their variables are called and wherever they are read. Which positions coincide is the atom's
pattern; an atom may also be read where more of them coincide than it asks for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from graphguard.engine.terms.lane import Lane, at_lane, collapse
from graphguard.engine.terms.term import Atom, Factor, Index, Range, Undescribed, Variable

Pattern = tuple[tuple[int, int], ...]  # for each position, which axis it is, and at what distance
MOST_POSITIONS_APART = 6  # past that, numbers that are equal are one position: atoms of atoms would have ever more axes
MOST_ORDERS = 24  # of factors that are alike, tried to find the canonical one


class Product(NamedTuple):
    """A labelled product over axes and bound variables. Axis n is the variable -1 - n; bound variable n has extents[n]."""

    label: Hashable
    factors: tuple[Factor, ...]
    extents: tuple[int, ...]


class Definition(NamedTuple):
    """What an atom is: a name, parameters, and operands, each a sum of products. `axes` counts its positions."""

    name: str
    parameters: tuple[Hashable, ...]
    operands: tuple[tuple[Product, ...], ...]
    axes: int


class Part(NamedTuple):
    """A product that goes into a definition, and the variables bound in it."""

    label: Hashable
    factors: tuple[Factor, ...]
    bound: tuple[Variable, ...] = ()


class Abstract(NamedTuple):
    """Parts as products over axes. `shape` is what they are but for their atoms and positions; `atoms` has the ids of those,
    `pattern` says which axis each position is, `positions` where it is, and `axes` lists the different ones."""

    shape: Hashable
    atoms: tuple[int, ...]
    pattern: Pattern
    products: tuple[Product, ...]
    positions: tuple[Index, ...]
    axes: tuple[Index, ...]


class _Position(NamedTuple):
    base: Hashable  # equal for equal free parts, of sums and of single positions apart
    free: Index
    bound: tuple[tuple[Variable, int], ...]
    shift: int  # a constant distance from the axis, which is part of the definition


class _Piece(NamedTuple):
    atom: Atom
    power: Fraction
    positions: tuple[_Position, ...]


_Arranged = list[tuple[Hashable, list[_Piece]]]


def abstract(parts: Sequence[Part], ranges: Mapping[Variable, Range], apart: bool = False) -> list[Abstract]:
    """One definition for all parts, in all orders of what is alike, the canonical one first. Bound variables start at 0;
    where they started becomes part of a position. `apart`: numbers that happen to be equal are different positions, so that
    what is said of row 0 of one tensor and row 0 of another can be said of any two rows."""
    extents: dict[Variable, int] = {}
    for part in parts:
        for variable in part.bound:
            size = collapse(ranges[variable][1] - ranges[variable][0])
            if not isinstance(size, int):
                raise Undescribed("a sum over parts of different sizes")
            extents[variable] = size
    arranged: _Arranged = [
        (part.label, sorted((_piece(f, extents, ranges) for f in part.factors), key=_likeness)) for part in parts
    ]
    arranged.sort(key=_part_likeness)
    apart = apart and sum(len(piece.positions) for _, pieces in arranged for piece in pieces) <= MOST_POSITIONS_APART
    found = [_numbered(order, extents, apart) for order in _orders(arranged)]
    return found if len(found) == 1 else sorted(found, key=lambda each: repr((each.shape, each.pattern)))


def _piece(factor: Factor, extents: Mapping[Variable, int], ranges: Mapping[Variable, Range]) -> _Piece:
    positions = []
    for index in factor.at:
        bound = tuple(t for t in index.terms if t[0] in extents) if extents else ()
        if bound:
            offset: Lane = index.offset
            for variable, stride in bound:
                offset = offset + stride * ranges[variable][0]
            free = Index(tuple(t for t in index.terms if t[0] not in extents), collapse(offset))
        else:
            free = index
        shift = free.offset if free.terms and type(free.offset) is int else 0
        free = Index(free.terms) if shift else free
        positions.append(_Position((bool(bound), free.key), free, bound, shift))
    return _Piece(factor.atom, factor.power, tuple(positions))


def _likeness(piece: _Piece) -> tuple[int, Fraction]:
    return piece.atom.id, piece.power


def _part_likeness(part: tuple[Hashable, list[_Piece]]) -> tuple[list[tuple[int, Fraction]], str]:
    return [_likeness(piece) for piece in part[1]], repr(part[0])


def _orders(arranged: _Arranged) -> Iterator[_Arranged]:
    """The orders of parts and factors that are alike. Past the cap only one is tried, and equal ones may get different keys."""
    groups = [list(group) for _, group in itertools.groupby(arranged, _part_likeness)]
    runs = [[list(run) for _, run in itertools.groupby(pieces, _likeness)] for _, pieces in arranged]
    count = math.prod(math.factorial(len(group)) for group in groups)
    count *= math.prod(math.factorial(len(run)) for part in runs for run in part)
    if count == 1 or count > MOST_ORDERS:
        yield arranged
        return
    for order in itertools.product(*(itertools.permutations(group) for group in groups)):
        chosen = [part for group in order for part in group]
        for pieces in itertools.product(*(_factor_orders(part[1]) for part in chosen)):
            yield [(label, inner) for (label, _), inner in zip(chosen, pieces, strict=True)]


def _factor_orders(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    runs = [list(run) for _, run in itertools.groupby(pieces, _likeness)]
    for order in itertools.product(*(itertools.permutations(run) for run in runs)):
        yield [piece for run in order for piece in run]


def _numbered(arranged: _Arranged, extents: Mapping[Variable, int], apart: bool) -> Abstract:
    axes: dict[Hashable, int] = {}
    different: list[Index] = []
    positions: list[Index] = []
    products = []
    for label, pieces in arranged:
        numbers: dict[Variable, int] = {}
        factors = []
        for piece in pieces:
            indices = []
            for position in piece.positions:
                bound = tuple((numbers.setdefault(v, len(numbers)), stride) for v, stride in position.bound)
                positions.append(Index(position.free.terms, position.shift) if position.shift else position.free)
                base = len(positions) if apart and not position.free.terms and not bound else position.base
                axis = axes.get(base)
                if axis is None:
                    axis = axes[base] = len(axes)
                    different.append(position.free)
                indices.append(Index(((-1 - axis, 1), *bound), position.shift))
            factors.append(Factor(piece.atom, tuple(indices), piece.power))
        products.append(Product(label, tuple(factors), tuple(extents[v] for v in numbers)))
    return Abstract(*shape_of(products), tuple(products), tuple(positions), tuple(different))


def shape_of(products: Sequence[Product]) -> tuple[Hashable, tuple[int, ...], Pattern]:
    """What products are but for their atoms and positions, their atoms, and which of their positions are one axis."""
    shape: list[Hashable] = []
    atoms: list[int] = []
    pattern: list[tuple[int, int]] = []
    for label, factors, extents in products:
        inner = []
        for factor in factors:
            bound = []
            for index in factor.at:
                pattern.append((-1 - index.terms[0][0], at_lane(index.offset, 0)))
                bound.append(index.terms[1:])
            atoms.append(factor.atom.id)
            inner.append((factor.power, tuple(bound)))
        shape.append((label, tuple(inner), extents))
    return tuple(shape), tuple(atoms), tuple(pattern)


def fitting(pattern: Pattern, found: Abstract) -> tuple[Index, ...] | None:
    """The positions of another atom's axes, if the parts are that atom: where it has one axis, they have one position."""
    axes: dict[int, Index] = {}
    for (axis, shift), position in zip(pattern, found.positions, strict=True):
        start = Index(position.terms, collapse(position.offset - shift)) if shift else position
        known = axes.setdefault(axis, start)
        if known is not start and known.key != start.key:
            return None
    return tuple(axes[axis] for axis in range(len(axes)))
