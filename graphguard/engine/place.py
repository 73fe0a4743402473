"""Where an atom is read, and whether that lies within where it was read before."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from graphguard.engine.lane import Lane, at_lane, key
from graphguard.engine.term import Factor, Index, Range, Variable

MOST_ELEMENTS = 1 << 16  # looked at one by one
_Box = tuple[tuple[int, int], ...]  # the first and the last position of each axis


class Place(NamedTuple):
    """The positions at which a factor reads its atom, lane by lane. Lanes of weight 0 have none."""

    at: tuple[Index, ...]
    ranges: Mapping[Variable, Range]
    weight: Lane = 1

    @staticmethod
    def of(factor: Factor, ranges: Mapping[Variable, Range], weight: Lane = 1) -> Place:
        return Place(factor.at, {v: ranges[v] for v in factor.variables()}, weight)

    @property
    def key(self) -> Hashable:
        """Equal for equal places but for the names of variables."""
        names = {v: n for n, v in enumerate(dict.fromkeys(v for index in self.at for v, _ in index.terms))}
        at = tuple((tuple((names[v], s) for v, s in index.terms), key(index.offset)) for index in self.at)
        return at, tuple((key(self.ranges[v][0]), key(self.ranges[v][1])) for v in names), key(self.weight)

    @property
    def lanes(self) -> list[int]:
        """The lanes in which something is read."""
        held = [self.weight, *(i.offset for i in self.at), *(bound for span in self.ranges.values() for bound in span)]
        count = next((len(number) for number in held if isinstance(number, np.ndarray)), 1)
        return [lane for lane in range(count) if at_lane(self.weight, lane) and not self._is_empty(lane)]

    def _is_empty(self, lane: int) -> bool:
        return any(at_lane(high, lane) <= at_lane(low, lane) for low, high in self.ranges.values())

    def box(self, lane: int) -> _Box:
        """The smallest box that has all positions of a lane."""
        return tuple(self._ends(index, lane) for index in self.at)

    def _ends(self, index: Index, lane: int) -> tuple[int, int]:
        low = high = at_lane(index.offset, lane)
        for variable, stride in index.terms:
            ends = [stride * (at_lane(bound, lane) - last) for last, bound in enumerate(self.ranges[variable])]
            low, high = low + min(ends), high + max(ends)
        return low, high

    def is_box(self) -> bool:
        """Whether all positions of the box are read."""
        named = [v for index in self.at for v, _ in index.terms]
        return len(set(named)) == len(named) and all(
            not index.terms or (len(index.terms) == 1 and abs(index.terms[0][1]) == 1) for index in self.at
        )

    def count(self, lane: int) -> int:
        sizes = [at_lane(high, lane) - at_lane(low, lane) for low, high in self.ranges.values()]
        return int(np.prod(sizes)) if sizes else 1

    def positions(self, lane: int) -> Iterable[tuple[int, ...]]:
        variables = list(self.ranges)
        spans = [range(at_lane(low, lane), at_lane(high, lane)) for low, high in self.ranges.values()]
        for chosen in product(*spans):
            where: dict[Variable, Any] = dict(zip(variables, chosen, strict=True))
            yield tuple(at_lane(i.offset, lane) + sum(s * where[v] for v, s in i.terms) for i in self.at)


def within(place: Place, others: Sequence[Place]) -> bool:
    """Whether all positions of a place are among those of others. False if these are too many to be looked at."""
    if not others:
        return False
    boxes = [other.box(lane) for other in others if other.is_box() for lane in other.lanes]
    left = [lane for lane in place.lanes if not any(_inside(place.box(lane), box) for box in boxes)]
    if not left:
        return True
    if sum(other.count(lane) for other in others for lane in other.lanes) > MOST_ELEMENTS:
        return False
    if sum(place.count(lane) for lane in left) > MOST_ELEMENTS:
        return False
    known = {position for other in others for lane in other.lanes for position in other.positions(lane)}
    return all(position in known for lane in left for position in place.positions(lane))


def _inside(inner: _Box, outer: _Box) -> bool:
    return all(low <= first and last <= high for (first, last), (low, high) in zip(inner, outer, strict=True))
