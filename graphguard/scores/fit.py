"""Points for kinds of evidence, fitted to known faults: step by step, as long as more faulty lines are named.

Points are whole numbers that a person chose, moved only where that names at least one more line: with some hundred faults, more
would learn them by heart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from graphguard.scores.known_faults import Known

_ROUNDS, _STEPS = 2, (1, -1, 3, -3)
_FIRST = 0.5  # that a line is named first counts so much beside that it is named first or second
_GAIN = 0.9


def fitted(known: Sequence[Known], start: Mapping[str, float]) -> dict[str, float]:
    """Points for all kinds of evidence that `start` has."""
    random, points = Random(0), dict(start)
    seen = {evidence for each in known for line in each.seen.values() for evidence in line}
    names, best = [name for name in points if name in seen], worth(known, points)
    for _ in range(_ROUNDS):
        random.shuffle(names)
        for name in names:
            for step in _STEPS:
                moved = {**points, name: points[name] + step}
                reached = worth(known, moved)
                if reached > best + _GAIN:
                    points, best = moved, reached
    return points


def worth(known: Sequence[Known], points: Mapping[str, float]) -> float:
    """How many faulty lines are named."""
    total = 0.0
    for each in known:
        lines = each.lines(points)
        total += any(line in each.faulty for line in lines[:2]) + _FIRST * any(line in each.faulty for line in lines[:1])
    return total
