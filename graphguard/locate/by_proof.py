"""What the proof says of where the ranks go wrong, as clues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphguard.graph.findings import Finding
from graphguard.graph.ir import Source
from graphguard.locate.clue import Clue, clues_at


def clues_of_proof(about: Finding, others: Sequence[Finding]) -> Iterator[Clue]:
    """about: the finding of the output that is looked at. others: those of further outputs that are wrong."""
    backward = None if about.phase is None else about.phase == "backward"
    lead = "held otherwise than expected" if not about.sources else "the proof stops here"
    yield from clues_at(lead, [about.distributed], backward, about.law)
    yield from clues_at(f"{lead}: around", about.sources[1:], backward, fades=0.7)
    yield from clues_at(f"{lead}: callers", callers(about), backward, fades=0.7)
    lines = {each.distributed.place: each.distributed for each in others if each.distributed is not None}
    yield from clues_at("the proof of another output stops here", lines.values(), fades=0.7)


def callers(finding: Finding) -> list[Source]:
    """The lines that called for an operation of the ranks, unless the sequential program may run them, too."""
    here, there = finding.distributed, finding.sequential
    calls = [] if here is None else list(here.outwards())[1:]
    return [line for line in calls if here is not None and (line.file == here.file or there is None or line.file != there.file)]
