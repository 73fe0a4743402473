"""Positions that are no box: what is read along one axis depends on what is read along another, as on a diagonal, or where
heads share their keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graphguard.engine.terms.lane import Lane, collapse, everywhere
from graphguard.engine.terms.term import Index, Range, Variable, extent

Steps = tuple[tuple[int, int], ...]  # how far a variable moves along which axes


class Lattice(NamedTuple):
    """All positions `start + Σ n · steps`, for each variable with n below its count."""

    start: tuple[int, ...]
    variables: tuple[tuple[Steps, int], ...]

    @staticmethod
    def of(at: Sequence[Index], ranges: Mapping[Variable, Range]) -> Lattice | None:
        found = Walk.of(at, ranges)
        start = tuple(each for each in found.start if isinstance(each, int))
        variables = tuple((steps, count) for steps, count in found.counts.items() if isinstance(count, int) and count > 0)
        if len(start) < len(found.start) or len(variables) < len(found.counts):
            return None
        return Lattice(start, variables)

    def covers(self, walk: Walk) -> bool:
        """Whether all positions of a walk are among these, in every lane."""
        if any(steps not in dict(self.variables) for steps in walk.counts):
            return False
        left = [collapse(a - b) for a, b in zip(walk.start, self.start, strict=True)]
        open_ones = dict(self.variables)
        while open_ones:
            found = next(((steps, axis) for steps in open_ones for axis in _alone(steps, open_ones)), None)
            if found is None:
                return False
            steps, axis = found
            stride, count = dict(steps)[axis], open_ones.pop(steps)
            if not everywhere(left[axis] % stride == 0):
                return False
            first = collapse(left[axis] // stride)
            if not (everywhere(first >= 0) and everywhere(first + walk.counts.get(steps, 1) <= count)):
                return False
            for each, by in steps:
                left[each] = collapse(left[each] - by * first)
        return all(everywhere(rest == 0) for rest in left)


def _alone(steps: Steps, open_ones: Mapping[Steps, int]) -> list[int]:
    """The axes along which nothing else moves."""
    return [axis for axis, _ in steps if sum(axis in dict(other) for other in open_ones) == 1]


class Walk(NamedTuple):
    """Where a factor reads: the first position, and how often each variable moves on, lane by lane."""

    start: tuple[Lane, ...]
    counts: Mapping[Steps, Lane]

    @staticmethod
    def of(at: Sequence[Index], ranges: Mapping[Variable, Range]) -> Walk:
        steps: dict[Variable, list[tuple[int, int]]] = {}
        start: list[Lane] = []
        for axis, index in enumerate(at):
            here = index.offset
            for variable, stride in index.terms:
                steps.setdefault(variable, []).append((axis, stride))
                here = here + stride * ranges[variable][0]
            start.append(collapse(here))
        counts: dict[Steps, Lane] = {}
        for variable, each in steps.items():
            more = counts.get(tuple(each), 1) - 1  # of one that moves alike
            counts[tuple(each)] = collapse(extent(ranges[variable]) + more)
        return Walk(tuple(start), counts)
