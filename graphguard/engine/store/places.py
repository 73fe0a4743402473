"""Which elements of an atom something is known of.

What the sequential program does with some elements says nothing of the others. So what it shows of an atom is kept with the
positions at which the atom was read, and asked for with the positions at which it is read: a note is of exactly its elements, a
question of all that may be meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from typing import NamedTuple

from graphguard.engine.store.lattice import Lattice, Walk
from graphguard.engine.terms.lane import Lane, at_lane, equal, everywhere, kinds
from graphguard.engine.terms.term import Index, Range, Variable, bounds, extent

MOST_PIECES = 64  # of a question, after what is known of it is cut away
MOST_LANES = 256


class Run(NamedTuple):
    """Positions along one axis, from the first to the last, by equal steps."""

    first: int
    last: int
    step: int = 1


class Reach(NamedTuple):
    """Positions along one axis between which a factor reads, lane by lane, and a step that divides their distances."""

    low: Lane
    high: Lane
    step: int


Box = tuple[Run, ...]


def place_of(at: Sequence[Index], ranges: Mapping[Variable, Range]) -> Box | Lattice | None:
    """The positions that are read, if they are the same in all lanes and have a simple form."""
    return box_of(at, ranges) or Lattice.of(at, ranges)


def box_of(at: Sequence[Index], ranges: Mapping[Variable, Range]) -> Box | None:
    """The positions that are read, if they are the same in all lanes and every combination of runs along the axes."""
    variables = [v for index in at for v, _ in index.terms]
    runs = [_run(index, ranges) for index in at]
    box = tuple(run for run in runs if run is not None)
    return box if len(set(variables)) == len(variables) and len(box) == len(runs) else None


def _run(index: Index, ranges: Mapping[Variable, Range]) -> Run | None:
    low, high = bounds(index, ranges)
    if not isinstance(low, int) or not isinstance(high, int) or high < low:
        return None
    step, count = 1, 1
    for variable, stride in sorted(index.terms, key=lambda term: abs(term[1])):
        size = extent(ranges[variable])
        if not isinstance(size, int):
            return None
        if size == 1:
            continue
        step = abs(stride) if count == 1 else step
        if stride % step or abs(stride) > step * count:  # a gap
            return None
        count += (size - 1) * (abs(stride) // step)
    return Run(low, high, step)


def _reach(index: Index, ranges: Mapping[Variable, Range]) -> Reach:
    steps = [stride for variable, stride in index.terms if not equal(extent(ranges[variable]), 1)]
    return Reach(*bounds(index, ranges), gcd(*steps))


class Places:
    """A set of elements of one atom."""

    def __init__(self) -> None:
        self.boxes: list[Box] = []
        self.lattices: list[Lattice] = []

    def note(self, place: Box | Lattice) -> None:
        if isinstance(place, Lattice):
            self.lattices += [place] if place not in self.lattices else []
        elif not any(_lies_in(place, known) for known in self.boxes):
            self.boxes = [known for known in self.boxes if not _lies_in(known, place)] + [place]

    def covers(self, at: Sequence[Index], ranges: Mapping[Variable, Range]) -> bool:
        """Whether all elements that are read are in the set, in every lane."""
        if self.lattices and any(each.covers(Walk.of(at, ranges)) for each in self.lattices):
            return True
        return self.covers_all([_reach(index, ranges) for index in at])

    def covers_all(self, reach: Sequence[Reach]) -> bool:
        if any(_covers(box, reach) for box in self.boxes):
            return True
        if len(self.boxes) < 2:
            return False
        lanes, _ = kinds([end for each in reach for end in each[:2]])
        asked = {tuple(Run(at_lane(r.low, lane), at_lane(r.high, lane)) for r in reach) for lane in lanes[:MOST_LANES]}
        return len(lanes) <= MOST_LANES and all(self._covers_in_pieces(box) for box in asked)

    def _covers_in_pieces(self, asked: Box) -> bool:
        left = [asked]
        for known in self.boxes:
            if all(run.step == 1 or run.first == run.last for run in known):
                left = [piece for box in left for piece in _without(box, known)]
            if len(left) > MOST_PIECES:
                return False
        return not left


def _covers(box: Box, reach: Sequence[Reach]) -> bool:
    for run, (low, high, step) in zip(box, reach, strict=True):
        if not (everywhere(low >= run.first) and everywhere(high <= run.last)):
            return False
        if run.step != 1 and (step % run.step or not everywhere((low - run.first) % run.step == 0)):
            return False
    return True


def _lies_in(box: Box, other: Box) -> bool:
    return _covers(other, [Reach(run.first, run.last, run.step if run.last > run.first else 0) for run in box])


def _without(box: Box, known: Box) -> Iterator[Box]:
    """What is left of a box, in boxes. All steps are one."""
    if any(mine.last < its.first or mine.first > its.last for mine, its in zip(box, known, strict=True)):
        yield box
        return
    for axis, (mine, its) in enumerate(zip(box, known, strict=True)):
        before, after = Run(mine.first, its.first - 1), Run(its.last + 1, mine.last)
        for rest in (before, after):
            if rest.first <= rest.last:
                yield (*box[:axis], rest, *box[axis + 1 :])
        box = (*box[:axis], Run(max(mine.first, its.first), min(mine.last, its.last)), *box[axis + 1 :])
