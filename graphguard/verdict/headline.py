"""What a finding says first: the difference, as far as it is known, and never what the prover did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from graphguard.graph.findings import Finding
from graphguard.locate.ranking import RAISES, Suspicion
from graphguard.oracle.difference import Counterexample
from graphguard.verdict.folding import alike

if TYPE_CHECKING:
    from graphguard.verdict.judge import Judgement


def told(about: Finding, suspects: Sequence[Suspicion], judgement: Judgement) -> Finding:
    """A finding about an output that differs, in the words that say most."""
    example = judgement.counterexample
    if example is not None and example.element.path != about.output:
        example = None
    known = suspects[0].text if suspects else None
    raises = bool(suspects) and any(clue.evidence == RAISES for clue in suspects[0].clues)
    if about.detail is None and not raises:  # the proof knows the difference
        said = about.kind == "unexpected-relation"  # what is held, and what is expected
        return about if said else replace(about, law=about.law or known)
    if known is not None:
        return replace(about, message=f"{about.output}: {known}")
    return replace(about, message=f"{about.output}: {_apart(example, suspects)}")


def _apart(example: Counterexample | None, suspects: Sequence[Suspicion]) -> str:
    """Where values part, with one of them; else that they do."""
    parting = None if example is None else example.parting
    if parting is None or parting.distributed is None or parting.at_the_end:
        return "it is not what the sequential program has"
    here = parting.distributed
    if suspects and here.place != suspects[0].place.place:
        return f"it is not what the sequential program has; the first value that differs is made at {here}"
    if parting.expected is None or parting.actual is None:
        return "what is made here is not what the sequential program has"
    return f"what is made here is {parting.actual:.7g} where the sequential program has {parting.expected:.7g}"


def of_open_ends(findings: Iterable[Finding], judgement: Judgement) -> list[Finding]:
    """Outputs that are neither proved nor seen to differ: what the numbers suggest, and where the proof stops."""
    return alike([_open(each, judgement) for each in findings])


def _open(finding: Finding, judgement: Judgement) -> Finding:
    path = finding.output
    if path is None or finding.needs_no_execution:
        return finding
    if finding.kind == "unexpected-relation" and path not in judgement.conjecture:
        return finding  # how the ranks hold it is proved
    detail = finding.detail if finding.detail is not None else finding.message.removeprefix(f"{path}: ")
    if path in judgement.conjecture:
        message = f"{path}: its numbers agree with the sequential program's, and this is not proved; the proof stops here"
    else:
        message = f"{path}: it is not known whether it is right; the proof stops here"
    return replace(finding, kind="relation-lost", message=message, detail=detail)
