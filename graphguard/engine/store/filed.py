"""Sums of the sequential program: what they are sums of, what they are parts of, and which of them functions are taken of."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from fractions import Fraction

from graphguard.engine.store.arguments import Ids
from graphguard.engine.store.journal import Journal, Recorded, asked, found, spoils, told
from graphguard.engine.terms.part import Whole
from graphguard.engine.terms.term import Atom, Range, Term

Powers = tuple[Fraction, ...]


def _split_row(atoms: Sequence[Atom]) -> tuple[object, Sequence[Atom]]:
    return None, atoms


def _split_whole(whole: Whole | None) -> tuple[object, Sequence[Atom]]:
    return (None, ()) if whole is None else (whole.form, whole.atoms)


class Filed(Recorded):
    def __init__(self, journal: Journal):
        super().__init__(journal)
        self._filed: set[int] = set()  # the sums of the sequential run, and other atoms that are asked for
        self._products: dict[Hashable, tuple[Range, ...]] = {}  # over what, by the atoms that they are sums of products of
        self._wholes: dict[int, Whole] = {}  # what atoms are parts of
        self._sums: dict[int, tuple[Atom, ...]] = {}  # sums of several products, by an atom that occurs in them
        self._operands: list[Term] = []  # sums that the sequential program passes to functions
        self._operand_ids: set[int] = set()

    @told
    def file(self, atom: Atom) -> None:
        """Note an atom of the sequential run."""
        self._filed.add(atom.id)

    @told
    def file_sum(self, total: Atom, members: Ids, powers: Powers, ranges: tuple[Range, ...]) -> None:
        """Note a sum of the sequential run, of products of these atoms, over these ranges."""
        self._filed.add(total.id)
        key = _product_key(members, powers)
        known = self._products.get(key, ())
        self._products[key] = known + tuple(span for span in dict.fromkeys(ranges) if span not in known)

    @asked
    def is_filed(self, atom: Atom) -> bool:
        """Whether the sequential run made this sum."""
        return atom.id in self._filed

    @asked
    def ranges_of(self, members: Ids, powers: Powers) -> tuple[Range, ...] | None:
        """The ranges of filed sums of products of the same atoms; None if there is no such sum."""
        return self._products.get(_product_key(members, powers))

    @found(_split_row)
    def sums_with(self, atom: Atom) -> Sequence[Atom]:
        """The sums that are noted under an atom that occurs in them."""
        return self._sums.get(atom.id, ())

    @told
    def note_sum(self, member: Atom, total: Atom) -> None:
        known = self._sums.get(member.id, ())
        self._sums[member.id] = known if total in known else (*known, total)

    @found(_split_whole)
    def whole_of(self, part: Atom) -> Whole | None:
        """What an atom is a part of."""
        return self._wholes.get(part.id)

    @told
    def note_whole(self, part: Atom, whole: Whole) -> None:
        self._wholes[part.id] = whole

    @told
    def note_operand(self, term: Term) -> None:
        """A sum that the sequential program passes to a function."""
        self._operands.append(term)
        self._operand_ids.add(term.factors[0].atom.id)

    @asked
    def is_operand(self, atom: Atom) -> bool:
        """Whether the sequential program passes this sum to a function."""
        return atom.id in self._operand_ids

    @spoils
    def operands(self) -> Sequence[Term]:
        return self._operands


def _product_key(ids: Iterable[int], powers: Iterable[Fraction]) -> Hashable:
    return tuple(sorted(zip(ids, powers, strict=True)))
