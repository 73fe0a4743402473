"""What the sequential program shows of elements of atoms, and what was declared of inputs.

Each fact has its places. What holds of every element because of how an atom is made (its sign, that it is 0 or 1) is said by
the atom itself; what is learnt from a use of some elements is noted here, for those elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from graphguard.engine.store.definitions import Definitions
from graphguard.engine.store.interval import Interval
from graphguard.engine.store.journal import Journal, Recorded, asked, spoils, told
from graphguard.engine.store.places import Places, box_of, place_of
from graphguard.engine.store.ranges import Numbers, Ranges, Span, hull, numbers_in
from graphguard.engine.terms.term import Atom, Factor, Range, Variable, substituted
from graphguard.graph.exposure import Shown

Kind = Literal["nonnegative", "nonzero", "logged", "computed"]
"""nonnegative: a root or a log is taken of it. nonzero: it is divided by. logged: a log is taken of it, which may be that of
zero. computed: it is a function that is not defined everywhere, and the sequential program takes it there."""


SHOWN_BY: Mapping[Kind, Shown] = {"nonnegative": Shown.NAN, "nonzero": Shown.ALL, "logged": Shown.ALL, "computed": Shown.ALL}
"""What has to be seen of a result, so that it tells: roots and logs of negative numbers are nan; all else may be infinite."""


class Facts(Recorded):
    def __init__(self, journal: Journal, definitions: Definitions):
        super().__init__(journal)
        self._definitions = definitions
        self._ranges: dict[int, Ranges] = {}
        self._places: dict[tuple[Kind, int], Places] = {}  # that an output shows
        self._subjects: dict[int, Factor | None] = {}  # what deltas compare, over their axes
        self._intervals: dict[int, Interval] = {}  # stated of inputs that are no whole numbers
        self._infinite: set[int] = set()  # atoms of which some elements are no numbers

    # ------------------------------------------------------------------ definedness
    @told
    def note(self, kind: Kind, factor: Factor, ranges: Mapping[Variable, Range], shown: Shown) -> None:
        """Note something of the elements that a factor of the sequential program reads, if an output shows it."""
        place = place_of(factor.at, ranges) if shown >= SHOWN_BY[kind] else None
        if place is not None:
            self._places.setdefault((kind, factor.atom.id), Places()).note(place)

    @asked
    def holds(self, kind: Kind, factor: Factor, ranges: Mapping[Variable, Range]) -> bool:
        """Whether something was noted of all elements that a factor reads, and is seen in an output."""
        known = self._places.get((kind, factor.atom.id))
        return known is not None and known.covers(factor.at, ranges)

    @told
    def note_infinite(self, atom: Atom) -> None:
        """Some elements of it are no numbers."""
        self._infinite.add(atom.id)

    @asked
    def is_infinite(self, atom: Atom) -> bool:
        return atom.id in self._infinite

    @told
    def state(self, atom: Atom, interval: Interval) -> None:
        """Every element of an input lies there."""
        self._intervals[atom.id] = interval

    @asked
    def stated(self, atom: Atom) -> Interval | None:
        return self._intervals.get(atom.id)

    # ------------------------------------------------------------------ whole numbers
    @told
    def declare(self, atom: Atom, low: int, high: int) -> None:
        """Every element lies in [low, high)."""
        self._ranges_of(atom).declare(((low, high),))

    @told
    def infer(self, factor: Factor, ranges: Mapping[Variable, Range], spans: Sequence[Span]) -> None:
        """The elements that a factor of the sequential program reads are some of these numbers."""
        box = box_of(factor.at, ranges)
        if box is not None:
            self._ranges_of(factor.atom).infer(box, numbers_in(spans))

    def _ranges_of(self, atom: Atom) -> Ranges:
        return self._ranges.setdefault(atom.id, Ranges())

    @asked
    def numbers(self, factor: Factor, ranges: Mapping[Variable, Range]) -> Numbers | None:
        """Which whole numbers may be where a factor reads; None if that is not known."""
        known = self._ranges.get(factor.atom.id)
        return None if known is None else known.at(factor.at, ranges)

    @asked
    def span(self, factor: Factor, ranges: Mapping[Variable, Range]) -> Span | None:
        """A range that all elements lie in that a factor reads."""
        found = self.numbers(factor, ranges)
        return None if found is None else hull(found)

    @asked
    def subject_span(self, delta: Factor, ranges: Mapping[Variable, Range]) -> Span | None:
        """A range that all elements lie in that a delta compares with a number."""
        subject = self._subject(delta.atom)
        if subject is None:
            return None
        axes = {-1 - n: index for n, index in enumerate(delta.at[:-1])}
        return self.span(subject._replace(at=tuple(substituted(index, axes) for index in subject.at)), ranges)

    def _subject(self, delta: Atom) -> Factor | None:
        if delta.id not in self._subjects:
            (product, *others) = self._definitions[delta].operands[0]
            simple = not others and len(product.factors) == 1 and product.label[1] == 1 and not product.extents  # type: ignore[index]
            self._subjects[delta.id] = product.factors[0] if simple and product.factors[0].power == 1 else None
        return self._subjects[delta.id]

    @spoils
    def ranges(self) -> Mapping[int, Ranges]:
        """What is known of whole numbers, by the ids of the atoms that hold them."""
        return self._ranges
