"""Which line of the ranks is named first: the one table that weighs clues, and how it is read.

A line has the points of the best evidence that was seen there, and a part of those of all other. The line with the most is the
fault; the next ones are where else to look. `python -m graphguard.scores.located` says how often that is right, on the half
of the known faults that the points were fitted on, and on the other half.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from graphguard.graph.ir import Source
from graphguard.locate.clue import Clue
from graphguard.locate.cut import DETACHED, EXCHANGED
from graphguard.locate.traits import Traits

RAISES = "it raises here"
CALLS = "it calls a suspected function, as other lines do"
MAIN = {  # evidence of the fault itself; all other is of lines near it
    RAISES, "repair: undone", "repair: regrouped", "repair: scaled where it scales", "repair: scaled", "repair: reduced",
    "repair: reduced gradient", "repair: retiled", "repair: inside", "first wrong, surely, and healed there",
    "first wrong, and healed there", "first wrong, surely", "another operation heals", "values part here", "known to the end",
    "the proof stops here", "held otherwise than expected",
}  # fmt: skip
_REST = 0.3  # of the points of evidence beside the best
_MUCH = 3  # kinds of main evidence, as which a line is as suspected as can be

POINTS: dict[str, float] = {
    RAISES: 30,
    # a change that was tried, and after which all outputs are right
    "repair: undone": 20,
    "repair: regrouped": 20,
    "repair: regrouped, wider": 7,
    "repair: scaled where it scales": 18,
    "repair: scaled": 5,
    "repair: reduced": 6,
    "repair: reduced, used here": 5,
    "repair: reduced gradient": 6,
    "repair: reduced gradient, used here": 1,
    "repair: retiled": 9,
    "repair: retiled, used here": 4,
    "repair: undone, used here": 1,
    "repair: scaled, used here": 1,
    "repair: scaled where it scales, used here": -2,
    "repair: inside": 1,
    "repair: something else is done here": 6,
    "another repair: undone": 3,
    "another repair: regrouped": 8,
    "another repair: regrouped, wider": 2,
    "another repair: scaled where it scales": 3,
    "another repair: scaled": 3,
    "another repair: reduced": 1,
    "another repair: reduced, used here": 1,
    "another repair: reduced gradient": 1,
    "another repair: reduced gradient, used here": 1,
    "another repair: retiled": 1,
    "another repair: retiled, used here": 1,
    "another repair: inside": 1,
    "another repair: something else is done here": 1,
    "another repair: scaled, used here": 1,
    "another repair: scaled where it scales, used here": 1,
    "another repair: undone, used here": 1,
    "weak repair: undone": 3,
    "weak repair: regrouped": 3,
    "weak repair: regrouped, wider": 1,
    "weak repair: scaled": 1,
    "weak repair: scaled, used here": 1,
    "weak repair: scaled where it scales": 1,
    "weak repair: reduced": 1,
    "weak repair: reduced, used here": 1,
    "weak repair: something else is done here": 1,
    "reduces for nobody": 26,
    # back from the wrong output: the operation that should have given something else
    "first wrong, surely, and healed there": 13,
    "first wrong, surely, and healed there: on the way from there": 4,
    "first wrong, and healed there": 5,
    "first wrong, and healed there: on the way from there": 4,
    "first wrong, surely": 7,
    "first wrong, surely: on the way from there": 1,
    "first wrong": 1,
    "first wrong: on the way from there": 1,
    "first wrong: before it": 4,
    "first wrong: inside": 2,
    "reduced to a multiple": 5,
    # another operation in its place, after which all outputs are right
    "another operation heals": 12,
    "another operation heals, too": 6,
    # forward to the first tensor that the sequential program does not have
    "values part here": 9,
    "values part here: beside": 9,
    "values part here: callers": 2,
    "known to the end": 4,
    "known to the end: beside": 6,
    "known to the end: callers": 1,
    # where the proof loses the relation
    "the proof stops here": 6,
    "the proof stops here: around": -1,
    "the proof stops here: callers": 5,
    "held otherwise than expected": 7,
    "held otherwise than expected: callers": 1,
    "the proof of another output stops here": 2,
    # what kind of line it is
    CALLS: 5,
    "the sequential program runs it, too": -6,
    "in a function that several lines call": -5,
    "it communicates": 1,
    "in a backward that was written": 2,
    "in another file than the program": -7,
    EXCHANGED: 1,
    DETACHED: 1,
}


@dataclass(frozen=True)
class Suspicion:
    """A line, the points that it has, and what was seen there."""

    place: Source
    points: float
    clues: tuple[Clue, ...]

    @property
    def text(self) -> str | None:
        """What is wrong there, in the words of the detector that is most exact."""
        told = [clue for clue in self.clues if clue.text is not None]
        return min(told, key=lambda clue: _exactness(clue.evidence)).text if told else None

    @property
    def backward(self) -> bool | None:
        known = [clue for clue in self.clues if clue.backward is not None]
        return max(known, key=lambda clue: POINTS.get(clue.evidence, 0) * clue.certainty).backward if known else None


_EXACT = (
    RAISES, "the proof stops here", "values part here", "repair", "first wrong", "known to the end", "another repair",
    "another operation",
)  # fmt: skip


def _exactness(evidence: str) -> int:
    """Whose words say most: the first of these."""
    return next((place for place, lead in enumerate(_EXACT) if evidence.startswith(lead)), len(_EXACT))


def ranked(clues: Iterable[Clue], traits: Traits | None) -> list[Suspicion]:
    """Distinct lines, the one with the most points first; of equal ones, the one that was seen first."""
    found = [
        Suspicion(_in_module(seen), score(evidence_of(seen), POINTS), tuple(seen)) for seen in by_place(clues, traits).values()
    ]
    return sorted(found, key=lambda each: -each.points)


def _in_module(seen: Sequence[Clue]) -> Source:
    """The line, in the modules in which a repair changes it; else in the one that the most exact clue is about."""
    place, inside = seen[0].place, [clue for clue in seen if clue.place.module]
    changed = [clue for clue in inside if clue.evidence.startswith("repair: ") and clue.evidence in MAIN]
    chosen = changed[0] if changed else min(inside, key=lambda clue: _exactness(clue.evidence), default=None)
    return place if chosen is None else place.inside(chosen.place.module)


def score(seen: Mapping[str, float], points: Mapping[str, float]) -> float:
    """The best evidence, a part of what else speaks for a line, and all that speaks against it."""
    given = [points.get(evidence, 0.0) * certainty for evidence, certainty in seen.items()]
    best = max(given, default=0.0)
    return best + _REST * (sum(number for number in given if number > 0) - max(best, 0.0)) + sum(n for n in given if n < 0)


def by_place(clues: Iterable[Clue], traits: Traits | None) -> dict[tuple[str, int], list[Clue]]:
    """The clues of each line, with what is true of the line itself."""
    found: dict[tuple[str, int], list[Clue]] = {}
    for clue in clues:
        found.setdefault(clue.place.place, []).append(clue)
    if traits is None:
        return found
    for seen in list(found.values()):
        for call in _calls(seen, traits):
            found.setdefault(call.place.place, []).append(call)
    for seen in found.values():
        seen += [Clue(seen[0].place, trait) for trait in traits.of(seen[0].place)]
    return found


def _calls(seen: list[Clue], traits: Traits) -> Iterator[Clue]:
    """Of a line in a function that several lines call, the call that is meant; the more is seen there, the more it counts."""
    main, here = sum(clue.evidence in MAIN for clue in seen), seen[0].place
    if main and here.caller is not None and (here.file, here.function) in traits.helpers:
        outer = (line for line in here.outwards() if (line.file, line.function) not in traits.helpers)
        yield Clue(next(outer, here.caller), CALLS, None, min(1.0, main / _MUCH), seen[0].backward)


def evidence_of(clues: Iterable[Clue]) -> dict[str, float]:
    """By kind of evidence, how sure the surest clue is."""
    found: dict[str, float] = {}
    for clue in clues:
        found[clue.evidence] = max(found.get(clue.evidence, 0.0), clue.certainty)
    return found
