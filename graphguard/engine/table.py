"""The atoms of one proof, and the products and sums that are filed under them.

The sequential run files each sum that it makes. A later product that contains it, whichever way it came about, is folded back
by elimination: for a summed variable, look up the product of the factors that mention it; if it is filed, its atom takes their
place. So the ranks may associate their contractions as they like, and partial sums need no marks: once a range is whole, the
product is the filed one.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from fractions import Fraction

import numpy as np

from graphguard.engine.definition import Abstract, Definition, Part, Pattern, Product, abstract, fitting, skeleton_of
from graphguard.engine.lane import equal, varies
from graphguard.engine.normal import normal
from graphguard.engine.term import (
    FIRST_ID,
    IDX,
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
)

MOST_FACTORS = 24
What = tuple[str, str, tuple[Hashable, ...], int]  # kind, name, parameters, number of operands


class Table:
    def __init__(self) -> None:
        self._atoms: dict[tuple[str, Hashable], Atom] = {}
        self._defined: dict[Hashable, dict[Pattern, Atom]] = {}  # by skeleton, then by pattern
        self._ids = itertools.count(FIRST_ID)
        self._filed: set[int] = set()  # the sums of the sequential run
        self._filed_products: set[Hashable] = set()  # the atoms that they are sums of products of
        self.definitions: dict[int, Definition] = {}
        self.subjects: dict[int, tuple[int, int]] = {}  # the range of what a delta compares, by the delta's atom
        self.bounds: dict[int, tuple[int, int]] = {}  # the declared range of an integer atom
        self.sums: dict[int, list[Atom]] = {}  # sums of several products, by an atom that occurs in them
        self.parts: dict[int, tuple[Atom, int]] = {}  # of an input given as a sum: what it is part of, and how many there are
        self.names = itertools.count()
        self.operands: list[Term] = []  # sums that the sequential program passes to functions
        self._operands: frozenset[int] = frozenset()
        self.leaves: dict[int, frozenset[int]] = {}  # what sums are made of
        self.vanishing: dict[int, bool] = {}  # whether an atom may be 0 where it seems positive
        self._required: set[int] = set()  # what the sequential program divides by, or takes roots of
        self.taken_as_defined: set[int] = set()  # what the ranks alone do so with
        self.written = 0  # terms written out so far
        self.folding = True  # off while sums are written out
        self.recording = True  # while the sequential program is described

    # ------------------------------------------------------------------ atoms
    def atom(self, kind: str, key: Hashable, **facts: bool) -> Atom:
        """The one atom of this kind and key."""
        known = self._atoms.get((kind, key))
        if known is None:
            known = self._atoms[kind, key] = self._new(kind, **facts)
        return known

    def _new(self, kind: str, **facts: bool) -> Atom:
        return Atom(next(self._ids), kind, **facts)

    def atoms(self) -> Iterable[tuple[tuple[str, Hashable], Atom]]:
        return self._atoms.items()

    def define(
        self,
        kind: str,
        name: str,
        parameters: tuple[Hashable, ...],
        operands: int,
        parts: Sequence[Part],
        ranges: Mapping[Variable, Range],
        **facts: bool,
    ) -> tuple[Atom, tuple[Index, ...]]:
        """The atom of a definition, and the positions at which it is read. The label of each part begins with its operand
        and its coefficient."""
        orders = abstract(parts, ranges)
        known = self._known((kind, name, parameters, operands), orders)
        if known is not None:
            return known
        found = orders[0]
        return self.add((kind, name, parameters, operands), found.products, len(found.axes), **facts), found.axes

    def find(
        self, kind: str, name: str, parts: Sequence[Part], ranges: Mapping[Variable, Range]
    ) -> tuple[Atom, tuple[Index, ...]] | None:
        """The atom of one operand's definition, if there is one."""
        return self._known((kind, name, (), 1), abstract(parts, ranges))

    def add(self, what: What, products: Sequence[Product], axes: int, **facts: bool) -> Atom:
        """The atom of products that are numbered already."""
        kind, name, parameters, operands = what
        skeleton, pattern = skeleton_of(products)
        atoms = self._defined.setdefault((*what, skeleton), {})
        if pattern not in atoms:
            atom = atoms[pattern] = self._new(kind, **facts)
            grouped = tuple(tuple(p for p in products if p.label[0] == number) for number in range(operands))  # type: ignore[index]
            self.definitions[atom.id] = Definition(name, parameters, grouped, axes)
        return atoms[pattern]

    def _known(self, what: What, orders: Sequence[Abstract]) -> tuple[Atom, tuple[Index, ...]] | None:
        loose: list[tuple[Abstract, Mapping[Pattern, Atom]]] = []
        for found in orders:
            atoms = self._defined.get((*what, found.skeleton))
            if atoms:
                exact = atoms.get(found.pattern)
                if exact is not None:
                    return exact, found.axes
                loose.append((found, atoms))
        for found, others in loose:
            for pattern, atom in others.items():
                axes = fitting(pattern, found)
                if axes is not None:
                    return atom, axes
        return None

    def known_operands(self) -> frozenset[int]:
        """The atoms of the sums that the sequential program passes to functions."""
        if len(self._operands) != len(self.operands):
            self._operands = frozenset(term.factors[0].atom.id for term in self.operands)
        return self._operands

    def require_defined(self, factors: Iterable[Factor]) -> None:
        """Note what is divided by, or taken a root of: where the sequential program does so, it is defined; what the
        ranks alone do so with is taken to be defined, which a report has to say."""
        for factor in factors:
            if factor.atom.positive or (factor.power > 0 and (factor.power.denominator == 1 or factor.atom.nonnegative)):
                continue
            if self.recording:
                self._required.add(factor.atom.id)
            elif factor.atom.id not in self._required:
                self.taken_as_defined.add(factor.atom.id)

    def number(self, number: Fraction) -> Atom:
        """A positive number as an atom: its powers need not be rational."""
        atom = self.atom("number", number, positive=True)
        atom.number = number
        return atom

    def declare(self, atom: Atom, low: int, high: int) -> None:
        """Note the range of an integer atom; what is known already stays, narrowed."""
        known = self.bounds.get(atom.id, (low, high))
        self.bounds[atom.id] = (max(low, known[0]), min(high, known[1]))

    # ------------------------------------------------------------------ sums
    def settle(self, term: Term) -> Term | None:
        """The normal form, with filed sums in place of what they stand for; the sequential run files what is left."""
        found = normal(term, self.subjects)
        if found is None:
            return None
        if not self.folding:
            return found
        folded = self._fold(found)
        return self.filed(folded, masks=False) if self.recording else folded

    def filed(self, term: Term, masks: bool = True) -> Term:
        """The term without sums: an atom for each. Masks, which are sums of deltas over values, may stay open."""
        while pending := [
            v for v in term.summed if not varies(extent(term.ranges[v])) and (masks or not _is_mask(term.factors, v))
        ]:
            inside, bound = _connected(term, pending[0], set(pending))
            part = Part((0, ONE), inside, bound)
            atom, axes = self.define("sum", "sum", (), 1, [part], term.ranges, **signs(inside))
            if self.recording:
                self._filed.add(atom.id)
                self._filed_products.add(_atoms_of(inside))
            term = self._replaced(term, inside, bound, atom, axes)
        return term

    def _fold(self, term: Term) -> Term:
        summed = term.summed
        while summed:
            folded = self._folded_once(term, summed)
            if folded is None:
                break
            term = folded
            summed = term.summed
        if len(term.factors) > MOST_FACTORS:
            raise Undescribed(f"a product of more than {MOST_FACTORS} factors")
        return term

    def _folded_once(self, term: Term, summed: Sequence[Variable]) -> Term | None:
        even = {v for v in summed if not varies(extent(term.ranges[v]))}
        for variable in sorted(even):
            inside = tuple(f for f in term.factors if variable in f.variables())
            whole = self._whole_part(term, inside, variable)
            if whole is not None:
                return whole
            if _atoms_of(inside) not in self._filed_products:
                continue
            outside = mentioned(f for f in term.factors if variable not in f.variables())
            closed = tuple(sorted(v for v in mentioned(inside) if v in even and v not in outside))
            for bound in ((variable,), closed) if len(closed) > 1 else ((variable,),):
                found = self.find("sum", "sum", [Part((0, ONE), inside, bound)], term.ranges)
                if found is not None and found[0].id in self._filed:
                    return self._replaced(term, inside, bound, *found)
        return None

    def _whole_part(self, term: Term, inside: tuple[Factor, ...], variable: Variable) -> Term | None:
        """The sum of all parts of a tensor is the tensor."""
        if len(inside) != 1 or inside[0].atom.id not in self.parts or inside[0].power != 1:
            return None
        original, count = self.parts[inside[0].atom.id]
        first, *at = inside[0].at
        low, high = term.ranges[variable]
        if first.terms != ((variable, 1),) or any(variable in dict(i.terms) for i in at):
            return None
        if not (equal(low + first.offset, 0) and equal(high - low, count)):
            return None
        return self._replaced(term, inside, (variable,), original, tuple(at))

    def _replaced(
        self, term: Term, inside: tuple[Factor, ...], bound: Iterable[Variable], atom: Atom, axes: tuple[Index, ...]
    ) -> Term:
        gone = {id(factor) for factor in inside}
        kept = tuple(factor for factor in term.factors if id(factor) not in gone)
        ranges = {v: span for v, span in term.ranges.items() if v not in bound}
        found = normal(term.with_(factors=(*kept, Factor(atom, axes)), ranges=ranges), self.subjects)
        assert found is not None
        return found


def _connected(term: Term, start: Variable, pending: set[Variable]) -> tuple[tuple[Factor, ...], tuple[Variable, ...]]:
    """The factors that hang together with a summed variable through summed variables, and those variables."""
    variables = {start}
    while True:
        inside = tuple(f for f in term.factors if variables & set(f.variables()))
        grown = variables | (mentioned(inside) & pending)
        if grown == variables:
            return inside, tuple(sorted(variables))
        variables = grown


def _atoms_of(factors: Iterable[Factor]) -> Hashable:
    return tuple(sorted((f.atom.id, f.power) for f in factors))


def _is_mask(factors: tuple[Factor, ...], variable: Variable) -> bool:
    """Whether a variable only says which values a delta accepts."""
    inside = [f for f in factors if variable in f.variables()]
    return len(inside) == 1 and inside[0].atom.kind == "delta" and inside[0].at[-1].terms == ((variable, 1),)


def signs(factors: Iterable[Factor]) -> dict[str, bool]:
    """What is known of the sign of a product."""
    nonnegative = [f.atom.nonnegative or (f.power % 2 == 0 and f.power > 0) for f in factors]
    return {"positive": all(f.atom.positive for f in factors), "nonnegative": all(nonnegative)}


def weighted(term: Term) -> tuple[Factor, ...]:
    """The factors, with a weight that varies as a factor: idx at the weight is the weight."""
    if not isinstance(term.weight, np.ndarray):
        return term.factors
    if (term.weight == 0).any():  # what is said of lanes without a share is void
        raise Undescribed("a function of what only some ranks hold")
    return (*term.factors, Factor(IDX, (Index((), term.weight),)))
