"""The findings of a refuted check: one for each cause, with the line to look at, where else to look, and what it spoils.

`gathered` collects all clues, `locate/ranking.py` weighs them, and `findings_of` is the only place where findings are made
of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from graphguard.graph.findings import Finding, Place
from graphguard.locate.by_proof import clues_of_proof
from graphguard.locate.clue import Clue
from graphguard.locate.ranking import Suspicion, ranked
from graphguard.verdict.folding import alike
from graphguard.verdict.headline import told

if TYPE_CHECKING:
    from graphguard.verdict.judge import Judgement

MOST_PLACES = 2  # beside the fault itself


def findings_of(findings: Sequence[Finding], judgement: Judgement) -> list[Finding]:
    """One finding for each cause: what an execution showed first, then what needs none."""
    wrong = [each for each in findings if each.output in judgement.kinds]
    plain = [each for each in findings if each.output not in judgement.kinds and each.needs_no_execution]
    return [*map(_with_all_lines, _causes(wrong, judgement)), *alike(plain)]


def _with_all_lines(finding: Finding) -> Finding:
    """The lines that it names come first among all that are involved."""
    lines = {source.place: source for source in reversed((*finding.lines, *finding.sources))}
    return replace(finding, sources=tuple(reversed(lines.values())))


def _causes(wrong: list[Finding], judgement: Judgement) -> list[Finding]:
    """Outputs that come of the first fault are its consequences; what is left has a cause of its own."""
    found: list[Finding] = []
    left = sorted(wrong, key=lambda each: each is not first_of(wrong, judgement))
    while left:
        about, others = left[0], left[1:]
        suspects = ranked(gathered(about, others, judgement, is_first=not found), judgement.traits)
        spoiled = _spoiled(others, suspects, judgement, is_first=not found)
        left = [each for each in others if each not in spoiled]
        cause = _cause(told(about, suspects, judgement), suspects, spoiled, judgement)
        found.append(cause if found else replace(cause, repair=judgement.repair))
    return found


def first_of(wrong: Sequence[Finding], judgement: Judgement) -> Finding | None:
    """The finding about the output that the counterexample is of."""
    example = judgement.counterexample
    shown = [each for each in wrong if example is not None and each.output == example.element.path]
    return next(iter([*shown, *wrong]), None)


def gathered(about: Finding, others: Sequence[Finding], judgement: Judgement, is_first: bool = True) -> list[Clue]:
    """All clues about one output. What was executed is about the first one."""
    return [*(judgement.clues if is_first else ()), *clues_of_proof(about, others)]


def _spoiled(others: Sequence[Finding], suspects: Sequence[Suspicion], judgement: Judgement, is_first: bool) -> list[Finding]:
    if is_first and judgement.heals_all:
        return list(others)
    reached = judgement.traits.outputs_of(suspects[0].place) if suspects and judgement.traits is not None else frozenset()
    return [each for each in others if each.output in reached]


def _cause(about: Finding, suspects: Sequence[Suspicion], spoiled: Sequence[Finding], judgement: Judgement) -> Finding:
    outputs = tuple(each.output for each in spoiled if each.output is not None)
    if not suspects:
        return replace(about, spoils=outputs)
    first, *others = suspects
    named = [Place("also", each.place) for each in others[:MOST_PLACES]]
    if about.distributed is not None and all(about.distributed.place != e.place.place for e in suspects[: MOST_PLACES + 1]):
        named.append(Place("stops", about.distributed))
    if about.distributed is not None and about.distributed.place == first.place.place:
        here = about.distributed.inside(first.place.module)
        turn = about.turn if about.distributed.module == here.module else None
        return replace(about, distributed=here, turn=turn, spoils=outputs, places=tuple(named))
    parting = judgement.counterexample.parting if judgement.counterexample is not None else None
    parts_here = parting is not None and parting.distributed is not None and parting.distributed.place == first.place.place
    return replace(
        about,
        distributed=first.place,
        sequential=parting.sequential if parts_here and parting is not None else about.sequential,
        phase=about.phase if first.backward is None else "backward" if first.backward else "forward",
        law=first.text if about.detail is None and about.kind != "unexpected-relation" else None,
        holdings=(),
        sources=(),
        turn=None,
        spoils=outputs,
        places=tuple(named),
    )
