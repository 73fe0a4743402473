"""What the sequential program shows of elements of atoms, and what was declared of inputs.

Each fact has its places. What holds of every element because of how an atom is made (its sign, that it is 0 or 1) is said by
the atom itself; what is learnt from a use of some elements is noted here, for those elements.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from graphguard.engine.lane import key
from graphguard.engine.lattice import Lattice
from graphguard.engine.places import Box, Places, box_of, place_of
from graphguard.engine.ranges import Numbers, Ranges, Span, hull, numbers_in
from graphguard.engine.term import Atom, Factor, Index, Range, Variable, substituted

if TYPE_CHECKING:
    from graphguard.engine.table import Table

Kind = Literal["nonnegative", "nonzero", "logged", "computed"]
"""nonnegative: a root or a log is taken of it. nonzero: it is divided by. logged: a log is taken of it, which may be that of
zero. computed: it is a function that is not defined everywhere, and the sequential program takes it there."""


class Read:
    """Where a factor reads, to be asked again for another atom."""

    def __init__(self, at: tuple[Index, ...], ranges: Mapping[Variable, Range]):
        self.at = at
        self.ranges = {v: ranges[v] for index in at for v, _ in index.terms}
        self._key: Hashable = (
            tuple(index.key for index in at),
            tuple((v, key(low), key(high)) for v, (low, high) in self.ranges.items()),
        )

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Read) and self._key == other._key


class Facts:
    def __init__(self, table: Table):
        self._table = table
        self._ranges: dict[int, Ranges] = {}
        self._places: dict[tuple[Kind, int], Places] = {}  # that an output shows
        self._everywhere: dict[tuple[Kind, int], Places] = {}  # and those where what is undefined may be taken away again
        self._subjects: dict[int, Factor | None] = {}  # what deltas compare, over their axes

    # ------------------------------------------------------------------ definedness
    def note(self, kind: Kind, factor: Factor, ranges: Mapping[Variable, Range]) -> None:
        """Note something of the elements that a factor of the sequential program reads."""
        place = place_of(factor.at, ranges)
        if place is not None:
            self._note(kind, factor.atom, place, self._table.exposed)

    def _note(self, kind: Kind, atom: Atom, place: Box | Lattice, exposed: bool) -> None:
        for known in (self._everywhere, self._places) if exposed else (self._everywhere,):
            known.setdefault((kind, atom.id), Places()).note(place)
        if self._table.trace is not None:
            self._table.trace.told(lambda there, atoms: there.facts._note(kind, atoms[0], place, exposed), (atom,))

    def is_done(self, kind: Kind, factor: Factor, ranges: Mapping[Variable, Range]) -> bool:
        """Whether the sequential program does so with all elements that a factor reads, be it seen in an output or not. It is
        asked once all is described."""
        known = self._everywhere.get((kind, factor.atom.id))
        return known is not None and known.covers(factor.at, ranges)

    def holds(self, kind: Kind, factor: Factor, ranges: Mapping[Variable, Range]) -> bool:
        """Whether something was noted of all elements that a factor reads, and is seen in an output."""
        known = self._places.get((kind, factor.atom.id))
        answer = known is not None and known.covers(factor.at, ranges)
        if self._table.trace is not None:
            self._table.trace.asked(_holds, (factor.atom.id,), answer, kind, Read(factor.at, ranges))
        return answer

    # ------------------------------------------------------------------ whole numbers
    def declare(self, atom: Atom, low: int, high: int) -> None:
        """Every element lies in [low, high)."""
        self._ranges_of(atom).declare(((low, high),))
        if self._table.trace is not None:
            self._table.trace.told(lambda there, atoms: there.facts.declare(atoms[0], low, high), (atom,))

    def infer(self, factor: Factor, ranges: Mapping[Variable, Range], spans: Iterable[Span]) -> None:
        """The elements that a factor of the sequential program reads are some of these numbers."""
        box = box_of(factor.at, ranges)
        if box is not None:
            self._infer(factor.atom, box, numbers_in(spans))

    def _infer(self, atom: Atom, box: Box, numbers: Numbers) -> None:
        self._ranges_of(atom).infer(box, numbers)
        if self._table.trace is not None:
            self._table.trace.told(lambda there, atoms: there.facts._infer(atoms[0], box, numbers), (atom,))

    def _ranges_of(self, atom: Atom) -> Ranges:
        return self._ranges.setdefault(atom.id, Ranges())

    def numbers(self, factor: Factor, ranges: Mapping[Variable, Range]) -> Numbers | None:
        """Which whole numbers may be where a factor reads; None if that is not known."""
        known = self._ranges.get(factor.atom.id)
        answer = None if known is None else known.at(factor.at, ranges)
        if self._table.trace is not None:
            self._table.trace.asked(_numbers, (factor.atom.id,), answer, Read(factor.at, ranges))
        return answer

    def span(self, factor: Factor, ranges: Mapping[Variable, Range]) -> Span | None:
        """A range that all elements lie in that a factor reads."""
        found = self.numbers(factor, ranges)
        return None if found is None else hull(found)

    def subject_span(self, delta: Factor, ranges: Mapping[Variable, Range]) -> Span | None:
        """A range that all elements lie in that a delta compares with a number."""
        trace, self._table.trace = self._table.trace, None
        subject = self._subject(delta.atom)
        if subject is None:
            answer = None
        else:
            axes = {-1 - n: index for n, index in enumerate(delta.at[:-1])}
            answer = self.span(subject._replace(at=tuple(substituted(index, axes) for index in subject.at)), ranges)
        self._table.trace = trace
        if trace is not None:
            trace.asked(_subject_span, (delta.atom.id,), answer, Read(delta.at, ranges))
        return answer

    def _subject(self, delta: Atom) -> Factor | None:
        if delta.id not in self._subjects:
            (product, *others) = self._table.definitions[delta.id].operands[0]
            simple = not others and len(product.factors) == 1 and product.label[1] == 1 and not product.extents  # type: ignore[index]
            self._subjects[delta.id] = product.factors[0] if simple and product.factors[0].power == 1 else None
        return self._subjects[delta.id]

    def ranges(self) -> Mapping[int, Ranges]:
        """What is known of whole numbers, by the ids of the atoms that hold them."""
        return self._ranges


def _holds(table: Table, ids: tuple[int, ...], kind: Kind, read: Read) -> bool:
    return table.facts.holds(kind, Factor(table.by_id(*ids), read.at), read.ranges)


def _numbers(table: Table, ids: tuple[int, ...], read: Read) -> Numbers | None:
    return table.facts.numbers(Factor(table.by_id(*ids), read.at), read.ranges)


def _subject_span(table: Table, ids: tuple[int, ...], read: Read) -> Span | None:
    return table.facts.subject_span(Factor(table.by_id(*ids), read.at), read.ranges)
