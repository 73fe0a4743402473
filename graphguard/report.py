"""What `verify` answers: the verdict, and what it rests on. Prints as plain text, and writes itself as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graphguard.engine.proof import Proof, Relation
from graphguard.errors import GraphGuardError
from graphguard.findings import Finding

_SHOWN_RELATIONS, _SHOWN_FINDINGS = 20, 5  # of a text that is not verbose


class NotVerifiedError(GraphGuardError):
    """Raised by `raise_if_not_verified`; has the report."""

    def __init__(self, report: Report):
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.report,)


class OutputRelation(dict[str, Relation]):
    """How each sequential output is rebuilt from the ranks' outputs, by path. Prints as one clean expression per output."""

    def __str__(self) -> str:
        return "\n".join(relation.text for relation in self.values())

    def to_plain(self) -> dict[str, Any]:
        return {
            path: {
                "text": relation.text,
                "placements": None if relation.placements is None else dict(relation.placements),
                "type": relation.type,
                "note": relation.note,
            }
            for path, relation in self.items()
        }


@dataclass
class Report:
    """The answer to one check.

    verdict: "verified", "refuted" or "unproven".
    relation: how each output is rebuilt from the ranks' outputs, for those where that was proved.
    findings: what is wrong, or where the proof stopped, the most telling first.
    counterexample: inputs on which the programs differ; None as long as nothing is executed.
    assumptions: what the verdict takes for granted.
    notes: what is no fault but worth a look, such as an output that is a sum over the ranks.
    opaque: operators that the proof met and knows no lemma for.
    stats: `ops`, `ranks`, and `seconds` for `capture`, `proof` and `oracle`.
    """

    verdict: str
    relation: OutputRelation = field(default_factory=OutputRelation)
    findings: list[Finding] = field(default_factory=list)
    counterexample: Any = None
    assumptions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of_findings(findings: Sequence[Finding], assumptions: Sequence[str]) -> Report:
        """Of ranks whose communication does not fit together: there is nothing to prove."""
        return Report("refuted", findings=_merged(findings), assumptions=list(assumptions))

    @staticmethod
    def of_proof(proof: Proof, assumptions: Sequence[str]) -> Report:
        return Report(
            "verified" if proof.proved else "unproven",
            OutputRelation(proof.relations),
            list(proof.findings),
            assumptions=list(dict.fromkeys((*assumptions, *proof.assumptions))),
            notes=[f"{path}: {relation.note}" for path, relation in proof.relations.items() if relation.note],
            opaque=list(proof.opaque),
        )

    @property
    def verified(self) -> bool:
        return self.verdict == "verified"

    def raise_if_not_verified(self) -> None:
        if not self.verified:
            raise NotVerifiedError(self)

    def to_plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "verdict": self.verdict,
            "relation": self.relation.to_plain(),
            "findings": [finding.to_plain() for finding in self.findings],
            "counterexample": self.counterexample,
            "assumptions": self.assumptions,
            "notes": self.notes,
            "opaque": self.opaque,
            "stats": self.stats,
        }

    def to_json(self) -> str:
        return json.dumps({"version": 1, **self.to_plain()}, indent=2)

    def lines(self, verbose: bool = False) -> list[str]:
        """What the verdict rests on, as text."""
        relations = [[_relation_line(relation, verbose)] for relation in self.relation.values()]
        findings = [_finding_lines(finding, verbose) for finding in self.findings]
        return [
            *_first(relations, len(relations) if verbose else _SHOWN_RELATIONS, "outputs"),
            *_first(findings, len(findings) if verbose else _SHOWN_FINDINGS, "findings"),
            *(f"no lemma for {operator}" for operator in self.opaque),
            *(f"note: {text}" for text in self.notes),
            *(f"assumed: {text}" for text in self.assumptions),
            *self._stats_line(),
        ]

    def _stats_line(self) -> list[str]:
        if not self.stats:
            return []
        seconds = ", ".join(f"{name} {value:.2f} s" for name, value in self.stats["seconds"].items() if value is not None)
        return [f"{_count(self.stats['ops'], 'operation')} on {_count(self.stats['ranks'], 'rank')}; {seconds}"]

    def __str__(self) -> str:
        return "\n".join([self.verdict, *(f"  {line}" for line in self.lines())])


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """What several ranks show alike is one finding."""
    ranks: dict[Finding, list[int]] = {}
    for finding in findings:
        ranks.setdefault(replace(finding, ranks=()), []).extend(finding.ranks)
    return [replace(finding, ranks=tuple(sorted(set(shown)))) for finding, shown in ranks.items()]


def _relation_line(relation: Relation, verbose: bool) -> str:
    return f"{relation.text}   : {relation.type}" if verbose and relation.type is not None else relation.text


def _finding_lines(finding: Finding, verbose: bool) -> list[str]:
    phase = f" ({finding.phase})" if finding.phase else ""
    lines = [str(finding)]
    if finding.sequential is not None:
        lines.append(f"  sequential   {finding.sequential}{phase}")
    if finding.distributed is not None:
        lines.append(f"  distributed  {finding.distributed}{phase}")
    if finding.repair is not None:
        lines.append(f"  repair       {finding.repair}")
    if verbose:
        others = [source for source in finding.sources if source not in (finding.sequential, finding.distributed)]
        lines += [f"  also         {source}" for source in others]
    return lines


def _first(items: list[list[str]], limit: int, what: str) -> list[str]:
    """The lines of the first items, and how many more there are."""
    lines = [line for item in items[:limit] for line in item]
    return [*lines, f"... and {len(items) - limit} more {what}"] if len(items) > limit else lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
