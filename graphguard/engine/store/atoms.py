"""The atoms of one proof, each once: by their names, or by how they are made of other atoms."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from fractions import Fraction

from graphguard.engine.store.arguments import Ids
from graphguard.engine.store.journal import Journal, Recorded, fixed, found, made, spoils
from graphguard.engine.terms.definition import Definition, Pattern
from graphguard.engine.terms.term import FIRST_ID, Atom

Found = Mapping[Pattern, Atom]


class Structure:
    """How an atom is made of other atoms. Those of layers that are alike are put together when someone asks."""

    __slots__ = ("_definition", "atoms", "pattern", "shape")

    def __init__(self, shape: int, pattern: Pattern, atoms: Sequence[Atom], definition: Definition | Structure):
        self.shape, self.pattern, self.atoms = shape, pattern, atoms
        self._definition = definition

    def of(self, atoms: Sequence[Atom]) -> Structure:
        return Structure(self.shape, self.pattern, atoms, self)

    @property
    def definition(self) -> Definition:
        if type(self._definition) is Structure:
            like = self._definition
            self._definition = _renamed(like.definition, {old.id: new for old, new in zip(like.atoms, self.atoms, strict=True)})
        return self._definition  # type: ignore[return-value]


def _renamed(definition: Definition, atoms: Mapping[int, Atom]) -> Definition:
    operands = tuple(
        tuple(p._replace(factors=tuple(f._replace(atom=atoms[f.atom.id]) for f in p.factors)) for p in operand)
        for operand in definition.operands
    )
    return definition._replace(operands=operands)


def _split_structure(structure: Structure | None) -> tuple[object, Sequence[Atom]]:
    return (None, ()) if structure is None else ((structure.shape, structure.pattern), structure.atoms)


def _split_found(atoms: Found | None) -> tuple[object, Sequence[Atom]]:
    return (tuple(atoms), list(atoms.values())) if atoms else (None, ())


class Atoms(Recorded):
    def __init__(self, journal: Journal):
        super().__init__(journal)
        self._ids = itertools.count(FIRST_ID)
        self._named: dict[tuple[str, Hashable], Atom] = {}
        self._made: dict[tuple[int, tuple[int, ...]], dict[Pattern, Atom]] = {}  # by shape and atoms, then by pattern
        self._structures: dict[int, Structure] = {}

    @spoils
    def named(self, kind: str, key: Hashable) -> Atom:
        """The one atom of this kind and key."""
        return self._of(kind, key)

    @fixed
    def number(self, key: Hashable) -> Atom:
        """A positive number: its powers need not be rational."""
        atom = self._of("number", key, positive=True)
        atom.number = key if isinstance(key, Fraction) else None
        return atom

    def _of(self, kind: str, key: Hashable, positive: bool = False) -> Atom:
        known = self._named.get((kind, key))
        if known is None:
            known = self._named[kind, key] = Atom(next(self._ids), kind, positive)
        return known

    @spoils
    def every(self) -> Iterable[tuple[tuple[str, Hashable], Atom]]:
        """All that have names."""
        return self._named.items()

    @found(_split_structure)
    def structure(self, atom: Atom) -> Structure | None:
        """How an atom is made; None for one that has a name."""
        return self._structures.get(atom.id)

    @found(_split_found)
    def like(self, shape: int, ids: Ids) -> Found | None:
        """The atoms of a shape that are made of these atoms, by pattern."""
        return self._made.get((shape, ids))

    @made
    def make(self, kind: str, structure: Structure, facts: tuple[str, ...]) -> Atom | None:
        """A new atom; None if there is one like it."""
        known = self._made.setdefault((structure.shape, tuple([atom.id for atom in structure.atoms])), {})
        if structure.pattern in known:
            return None
        atom = known[structure.pattern] = Atom(next(self._ids), kind, **dict.fromkeys(facts, True))
        self._structures[atom.id] = structure
        return atom
