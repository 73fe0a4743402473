"""A clue: one reason to look at one line of the ranks. Every detector yields them, and `ranking.py` weighs them.

A detector says what it saw (`evidence`, a row of the table of `ranking.py`), never how much that is worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from graphguard.graph.ir import Source


@dataclass(frozen=True)
class Clue:
    """place: a line of the ranks. evidence: what was seen there, a row of the table.

    text: what is wrong there, in words, if the detector can tell. certainty: from 0 to 1, less for what is one of several.
    backward: whether it was seen of a gradient; None where the detector does not know.
    """

    place: Source
    evidence: str
    text: str | None = None
    certainty: float = 1.0
    backward: bool | None = None


def clues_at(
    evidence: str, places: Iterable[Source | None], backward: bool | None = None, text: str | None = None, fades: float = 1.0
) -> Iterator[Clue]:
    """One clue for each line. fades: how much less sure each is than the one before it."""
    certainty = 1.0
    for place in places:
        if place is not None:
            yield Clue(place, evidence, text, certainty, backward)
            certainty *= fades
