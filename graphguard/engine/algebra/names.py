"""Elements of atoms by what they are, down to the inputs: equal for equal definitions at equal positions.

Two atoms may be one formula. Which of the positions in a formula are one is part of its definition, and some are equal by
chance: row 1 of matrix 1 is described as something else than row 0 of matrix 1. Read at its positions, it is the same formula.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import islice, permutations
from itertools import product as choices

from graphguard.engine.store.table import Table
from graphguard.engine.terms.definition import Product
from graphguard.engine.terms.lane import Lane, collapse, key
from graphguard.engine.terms.term import Atom, Factor, Index, Term, Variable, extent

Where = tuple[int, ...]  # a variable: of a dim of the tensor; or, inside of so many definitions, of what is summed
Linear = tuple[tuple[tuple[Where, int], ...], Lane]  # multiples of such, and an offset
Powers = tuple[tuple[int, Fraction], ...]  # elements, each to a power
MOST_ORDERS = 6  # of the variables that a product sums over
DIM = -1


class Names:
    """Numbers for what was seen; equal numbers are equal elements."""

    def __init__(self, table: Table):
        self._table = table
        self._numbers: dict[Hashable, int] = {}
        self._elements: dict[Hashable, int] = {}
        self._read: dict[int, tuple[Atom, list[Linear]]] = {}  # by element, an atom that it is one of, and where

    def of_product(self, term: Term) -> tuple[Powers, Hashable]:
        """Of a term without sums: its factors, wherever its variables begin and whatever they are called."""
        places = self.of_dims(term)
        return self.collected((self.of_factor(f, places), f.power) for f in term.factors), self.of_frame(term)

    def of_frame(self, term: Term) -> Hashable:
        """Which elements of the tensor a term is of."""
        sizes = tuple(tuple(key(extent(term.ranges[v])) for v in group) for group in term.dims)
        return sizes, tuple((key(low), key(high)) for low, high in term.box), key(term.weight)

    def of_dims(self, term: Term) -> dict[Variable, Linear]:
        """The variables of a term's dims, each counted from its own first element."""
        return {
            v: ((((DIM, dim, place), 1),), term.ranges[v][0])
            for dim, group in enumerate(term.dims)
            for place, v in enumerate(group)
        }

    def of_factor(self, factor: Factor, places: Mapping[Variable, Linear]) -> int:
        """Of the atom at its positions; the power is left out."""
        at = [_at(index, places) for index in factor.at]
        place = tuple((terms, key(offset)) for terms, offset in at)
        known = self._elements.get((factor.atom.id, place))
        if known is None:
            known = self._elements[factor.atom.id, place] = self._number(self._content(factor.atom, at, place))
            self._read.setdefault(known, (factor.atom, at))
        return known

    def summands_of(self, element: int) -> list[tuple[Fraction, Powers]] | None:
        """What an element is the sum of; None if it is no sum."""
        atom, at = self._read[element]
        if atom.kind not in ("sum", "lin"):
            return None
        axes = {-1 - n: position for n, position in enumerate(at)}
        found = []
        for product in self._table.definitions[atom].operands[0]:
            for steps in choices(*map(range, product.extents)):
                places = {**axes, **{n: ((), step) for n, step in enumerate(steps)}}
                powers = self.collected((self.of_factor(f, places), f.power) for f in product.factors)
                found.append((product.label[1], powers))  # type: ignore[index]
        return found

    def _number(self, content: Hashable) -> int:
        return self._numbers.setdefault(content, len(self._numbers))

    def _content(self, atom: Atom, at: Sequence[Linear], place: Hashable) -> Hashable:
        definition = self._table.definitions.get(atom)
        if definition is None:
            return "atom", atom.id, place
        axes = {-1 - n: position for n, position in enumerate(at)}
        depth = 1 + max((where[0] for terms, _ in at for where, _ in terms), default=DIM)
        operands = tuple(
            tuple(sorted(self._product(product, axes, depth) for product in operand)) for operand in definition.operands
        )
        beyond = tuple((terms, key(offset)) for terms, offset in at[definition.axes :])
        return atom.kind, definition.name, definition.parameters, operands, beyond

    def _product(self, product: Product, axes: Mapping[Variable, Linear], depth: int) -> int:
        """A product inside of a definition; what it sums over is named in the order that gives the smallest number."""
        count = len(product.extents)
        found = []
        for order in islice(permutations(range(count)), MOST_ORDERS):
            bound: dict[Variable, Linear] = {n: ((((depth, order[n]), 1),), 0) for n in range(count)}
            places = {**axes, **bound}
            factors = self.collected((self.of_factor(f, places), f.power) for f in product.factors)
            extents = tuple(product.extents[order.index(n)] for n in range(count))
            found.append(self._number(("product", product.label, factors, extents)))
        return min(found)

    def collected(self, factors: Iterable[tuple[int, Fraction]]) -> Powers:
        """Elements with their powers. Whole powers of one are one power; opposite ones stay apart, as it may be zero, unless it
        is known to be positive, and so do roots. What is 0 or 1 has no powers."""
        powers: dict[tuple[int, bool], Fraction] = {}
        roots: list[tuple[int, Fraction]] = []
        for element, power in factors:
            atom = self._read[element][0]
            if power.denominator != 1:
                roots.append((element, power))
            elif atom.indicator and power > 0:
                powers[element, True] = Fraction(1)
            else:
                place = element, atom.positive or power > 0
                powers[place] = powers.get(place, Fraction(0)) + power
        return tuple(sorted([(element, power) for (element, _), power in powers.items() if power] + roots))


def _at(index: Index, places: Mapping[Variable, Linear]) -> Linear:
    strides: dict[Where, int] = {}
    offset: Lane = index.offset
    for variable, stride in index.terms:
        terms, start = places[variable]
        offset = offset + stride * start
        for where, times in terms:
            strides[where] = strides.get(where, 0) + stride * times
    return tuple(sorted((where, s) for where, s in strides.items() if s)), collapse(offset)
