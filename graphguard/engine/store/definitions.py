"""What atoms are, and the one atom of a definition."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from graphguard.engine.store.arguments import Ids
from graphguard.engine.store.atoms import Atoms, Found, Structure
from graphguard.engine.terms.definition import Abstract, Definition, Part, abstract, fitting
from graphguard.engine.terms.term import Atom, Index, Range, Variable

What = tuple[str, str, tuple[Hashable, ...], int]  # kind, name, parameters, number of operands
Read = tuple[Atom, tuple[Index, ...]]  # an atom, and the positions at which it is read


class Definitions:
    def __init__(self, atoms: Atoms):
        self._atoms = atoms
        self._shapes: dict[tuple[What, Hashable], int] = {}  # numbers, which are quicker to look up

    def get(self, atom: Atom) -> Definition | None:
        structure = self._atoms.structure(atom)
        return None if structure is None else structure.definition

    def __getitem__(self, atom: Atom) -> Definition:
        found = self.get(atom)
        if found is None:
            raise KeyError(atom)
        return found

    def __contains__(self, atom: Atom) -> bool:
        return self._atoms.structure(atom) is not None

    def define(self, what: What, parts: Sequence[Part], ranges: Mapping[Variable, Range], **facts: bool) -> Read:
        """The atom of a definition. The label of each part begins with its operand and its coefficient."""
        known = self.find(what, parts, ranges)
        if known is not None:
            return known
        found = abstract(parts, ranges, apart=True)[0]
        return self._added(what, found, tuple([name for name, holds in facts.items() if holds])), found.axes

    def find(self, what: What, parts: Sequence[Part], ranges: Mapping[Variable, Range]) -> Read | None:
        """The atom of a definition, if there is one."""
        loose: list[tuple[Abstract, Found]] = []
        for found in abstract(parts, ranges):
            atoms = self._like(what, found)
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

    def _like(self, what: What, found: Abstract) -> Found | None:
        return self._atoms.like(self._number(what, found), Ids(found.atoms))

    def _number(self, what: What, found: Abstract) -> int:
        return self._shapes.setdefault((what, found.shape), len(self._shapes))

    def _added(self, what: What, found: Abstract, facts: tuple[str, ...]) -> Atom:
        kind, name, parameters, operands = what
        known = self._like(what, found)
        if known and found.pattern in known:
            return known[found.pattern]
        grouped = tuple(tuple(p for p in found.products if p.label[0] == each) for each in range(operands))  # type: ignore[index]
        definition = Definition(name, parameters, grouped, len(found.axes))
        atoms = tuple([factor.atom for product in found.products for factor in product.factors])
        atom = self._atoms.make(kind, Structure(self._number(what, found), found.pattern, atoms, definition), facts)
        assert atom is not None
        return atom
