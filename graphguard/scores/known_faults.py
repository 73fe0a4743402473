"""Faults whose line is known: the examples of bugs, the faulty proof cases, and mutants of the proof cases that verify.

Each is proved and executed as a check is, and what was seen of its lines is kept: `Known.seen` is all that ranking looks at.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from graphguard.checks.discovery import find_checks, select
from graphguard.engine.proof import Proof
from graphguard.engine.prove import prove
from graphguard.engine.second_attempt import proved_apart
from graphguard.errors import GraphGuardError
from graphguard.gallery.rows import GALLERY, fault_lines
from graphguard.graph.findings import Finding
from graphguard.lemmas.known import all_lemmas
from graphguard.lemmas.user import by_operator
from graphguard.locate.ranking import by_place, evidence_of, score
from graphguard.mutate.campaign import families_below, job_of
from graphguard.mutate.mutant import DrawingError, mutants_of
from graphguard.mutate.specimen import Specimen, specimen
from graphguard.pipeline import Job, collecting
from graphguard.verdict.causes import first_of, gathered
from graphguard.verdict.judge import Judgement, judge
from graphguard.verdict.verdict import suited

Place = tuple[str, int]
Seen = dict[Place, dict[str, float]]  # by line, how surely each kind of evidence was seen there


@dataclass(frozen=True)
class Known:
    """faulty: the lines that are wrong. seen: in the order in which it was seen. named: where no clues are weighed."""

    name: str
    group: str
    faulty: frozenset[Place]
    seen: Seen
    named: tuple[Place, ...] = ()

    @property
    def is_fitted(self) -> bool:
        """Whether it is of the half that points are fitted on, which the name alone decides."""
        return hashlib.sha256(self.name.encode()).digest()[0] % 2 == 0

    def lines(self, points: Mapping[str, float]) -> list[Place]:
        """In the order in which a report names them."""
        if self.named:
            return list(self.named)
        scores = {place: score(seen, points) for place, seen in self.seen.items()}
        return sorted(scores, key=lambda place: -scores[place])

    def is_located(self, points: Mapping[str, float], most: int = 2) -> bool:
        return any(place in self.faulty for place in self.lines(points)[:most])


def _known(name: str, group: str, faulty: Iterable[Place], findings: Sequence[Finding], judgement: Judgement) -> Known | None:
    """None where nothing differs."""
    told = suited(findings, judgement)
    wrong = [each for each in told if each.output in judgement.kinds]
    about = first_of(wrong, judgement)
    if about is None:
        named = tuple(dict.fromkeys(line.place for each in findings for line in each.lines))
        return Known(name, group, frozenset(faulty), {}, named) if findings else None
    clues = gathered(about, [each for each in wrong if each is not about], judgement)
    seen = {place: evidence_of(those) for place, those in by_place(clues, judgement.traits).items()}
    return Known(name, group, frozenset(faulty), seen)


def of_job(name: str, group: str, faulty: Iterable[Place], job: Job) -> Known | None:
    lemmas = by_operator(job.lemmas)
    problem = job.front.problem(frozenset(lemmas))
    captured = problem.captured
    if captured.joint.findings:
        return _known(name, group, faulty, captured.joint.findings, Judgement())
    attempt: Callable[[bool], Proof] = lambda apart: prove(  # noqa: E731
        captured.sequential,
        captured.world(apart),
        expected=problem.expected,
        ranges=problem.ranges,
        lemmas=all_lemmas(lemmas),
    )
    proof = attempt(False)
    graphs = captured.sequential, captured.joint, captured.relations
    judged = partial(judge, *graphs, problem.expected, problem.bounds, no_parts=proof.no_parts, small=False)
    judgement = judged(proved=proof.unconditional)
    if not judgement.different:
        proof = proved_apart(proof, problem.mesh.size, partial(attempt, True))
    return _known(name, group, faulty, proof.findings, judgement)


def bugs(only: str = "") -> Iterator[Known]:
    """Those of `examples/bugs`."""
    for target in select([str(GALLERY / "bugs")]).targets:
        if only not in target.file:
            continue
        for check in find_checks(target.file):
            if check.expect != "refuted":
                continue
            with collecting() as jobs:
                check.run()
            faulty = [(os.path.abspath(check.file), line) for line in fault_lines(check.file, check.name)]
            found = of_job(os.path.basename(check.file), "bugs", faulty, jobs[0])
            if found is not None:
                yield found


def cases(folder: str, every: int = 1, most_ranks: int = 4) -> Iterator[Known]:
    """Faulty proof cases, one of so many of them."""
    faulty = [case for family in families_below(folder).values() for case in family if case.fault is not None]
    for case in (case for case in faulty[::every] if _size(case) <= most_ranks):
        found = of_job(case.name, "cases", [case.fault_location], job_of(case))
        if found is not None:
            yield found


def mutants(folder: str, count: int, most_ranks: int = 4) -> Iterator[Known]:
    """One of each of so many proof cases that verify, spread over all of them."""
    every = [case for family in families_below(folder).values() for case in family if case.expect == "verified"]
    small = [case for case in every if _size(case) <= most_ranks]
    for case in small[:: max(1, len(small) // count)]:
        try:
            made = specimen(case.name, job_of(case))
            found = _mutant(made)
        except (GraphGuardError, DrawingError):
            continue  # it does not verify by a relation that can be stated, or cannot be changed
        if found is not None:
            yield found


def _mutant(made: Specimen) -> Known | None:
    for mutant in mutants_of(made, "located").several(3):
        if mutant.joint.findings or made.difference(mutant.joint) is None:
            continue
        proof = made.prove(mutant.joint, agrees=False)
        graphs = made.sequential, mutant.joint, made.relations
        options: dict[str, Any] = {"proved": proof.unconditional, "no_parts": proof.no_parts, "small": False}
        judgement = judge(*graphs, made.expected, made.ranges, **options)
        name = f"{made.name}: {mutant.words}"
        return _known(name, "mutants", mutant.places, proof.findings, judgement)
    return None


def _size(case: Any) -> int:
    size = 1
    for each in case.mesh.values():
        size *= each
    return size
