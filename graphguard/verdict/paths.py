"""What reports along several paths say together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from graphguard.capture.front import Along, Decision
from graphguard.errors import InternalError
from graphguard.graph.findings import Finding
from graphguard.report.report import Choice, OutputRelation, Report

SHOWN = 16  # numbers of a decision
OPEN = "which way a rank goes is not shown to follow from what the sequential program decides"


def without_decisions(report: Report, along: Along) -> None:
    """Of one path: that ranks decide as the sequential program does is no output of the user's. What is not known to follow is
    assumed, and then nothing is verified."""
    decisions = along.of_ranks
    report.relation = OutputRelation({path: each for path, each in report.relation.items() if path not in decisions})
    report.conjecture = {path: each for path, each in report.conjecture.items() if path not in decisions}
    report.assumptions += [f"{each}; it is taken to be as on the sample" for each in along.unexplained]
    if along.unexplained and report.verdict == "verified":
        report.verdict = "unproven"
        report.findings = [Finding("relation-lost", f"{OPEN}: {along.unexplained[0]}")]


def of_paths(answers: Sequence[tuple[Along | None, Report]]) -> Report:
    """The report that says least is the one that counts. It is never one for all inputs: `paths` says along how many."""
    if not answers or any(along is None and report.verdict != "refuted" for along, report in answers):
        raise InternalError("programs that read values have no path, and are not refuted; please report it")
    order = {"refuted": 0, "unproven": 1, "verified": 2}
    along, report = min(answers, key=lambda each: order[each[1].verdict])
    report.paths, report.decisions = len(answers), _tried([each for each, _ in answers if each is not None])
    if report.verdict != "verified":
        number = next(number for number, each in enumerate(answers, 1) if each[1] is report)
        proved = sum(each.verdict == "verified" for _, each in answers)
        chosen = "" if along is None else f": {'; '.join(f'{d.text} has {_preview(d)}' for d in along.decisions)}"
        report.notes.insert(0, f"this is path {number} of {len(answers)}; {proved} verified{chosen}")
        return report
    for name in ("assumptions", "notes", "opaque"):
        setattr(report, name, list(dict.fromkeys(chain.from_iterable(getattr(each, name) for _, each in answers))))
    report.conditions = tuple(dict.fromkeys(chain.from_iterable(each.conditions for _, each in answers)))
    if not all("kept" in each.stats for _, each in answers):
        report.stats.pop("kept", None)
    report.stats["seconds"] = {
        phase: sum(each.stats["seconds"][phase] or 0.0 for _, each in answers) for phase in report.stats["seconds"]
    }
    return report


def _tried(paths: Sequence[Along]) -> tuple[Choice, ...]:
    """Every decision of the sequential program, with what it was on the paths. On one path it may be made more than once: of
    several tensors, on one line."""
    by_text: dict[str, list[list[Decision]]] = {}
    for path in paths:
        for text in dict.fromkeys(decision.text for decision in path.decisions):
            by_text.setdefault(text, []).append([each for each in path.decisions if each.text == text])
    return tuple(Choice(text, _ways(tried), _seen([*chain(*tried)])) for text, tried in by_text.items())


def _ways(tried: Sequence[Sequence[Decision]]) -> int:
    return len({tuple(each.chosen for each in on_one_path) for on_one_path in tried})


def _seen(decisions: Sequence[Decision]) -> str:
    """In words, how different the decisions are."""
    occur = [set(_numbers(each).tolist()) for each in decisions]
    known = set[int]().union(*occur)
    if all(len(each) <= 1 for each in occur):
        return f"it is {', '.join(str(each) for each in sorted(known))}" if known else "it is empty"
    least, most = min(map(len, occur)), max(map(len, occur))
    return f"{least if least == most else f'{least} to {most}'} of {len(known)} numbers occur"


def _preview(decision: Decision) -> str:
    numbers = _numbers(decision).tolist()
    if len(numbers) > 4 and len(set(numbers)) == 1:
        return f"{len(numbers)} times {numbers[0]}"
    return f"{numbers[:SHOWN]}".replace("]", ", ...]") if len(numbers) > SHOWN else str(numbers)


def _numbers(decision: Decision) -> np.ndarray:
    return np.frombuffer(decision.chosen.data, dtype=decision.chosen.dtype)
