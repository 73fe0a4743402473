"""What `verify` answers: the verdict, and what it rests on. Prints as plain text, and writes itself as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graphguard.engine.proof import Condition, Proof, Relation
from graphguard.errors import GraphGuardError
from graphguard.graph.findings import Finding
from graphguard.graph.limits import Stop
from graphguard.graph.listing import ListedProgram
from graphguard.oracle.difference import Counterexample
from graphguard.render.shown import SHOWN_CONDITIONS

VERSION = 1  # of the JSON; docs/report-schema.json has its schema


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


@dataclass(frozen=True)
class Choice:
    """What a program decided by values, on all paths that were tried. ways: how many different ones there were."""

    text: str  # `topk at moe.py:318`
    ways: int
    seen: str  # `2 to 4 of 4 numbers occur`

    def __str__(self) -> str:
        return f"{self.text}: {self.ways} {'way' if self.ways == 1 else 'ways'} tried; {self.seen}"

    def to_plain(self) -> dict[str, Any]:
        return {"text": self.text, "ways": self.ways, "seen": self.seen}


@dataclass(repr=False)
class Report:
    """The answer to one check.

    verdict: "verified", "refuted" or "unproven".
    relation: how each output is rebuilt from the ranks' outputs, for those where that was proved.
    findings: what is wrong, or where the proof stopped, the most telling first.
    counterexample: inputs on which the programs differ, executed; None if none was seen.
    conjecture: by output without a proof, the relation that the numbers suggest.
    assumptions: what the verdict takes for granted.
    notes: what is no fault but worth a look, such as an output that is a sum over the ranks.
    parameters: by parameter of a module, its relation to the ranks' ones and how it was found.
    opaque: operators that the proof met and knows no lemma for.
    stats: `ops`, `ranks`, `seconds` for `capture`, `proof` and `oracle`, and what the oracle did; `classes` of ranks that were
    captured at once, or why they were captured `one_by_one`.
    conditions: what must hold so that what only the ranks compute is defined; the proof says nothing of other inputs.
    stopped: limits of work that were reached, and what they may have left open.
    paths: along how many paths the verdict holds, for programs that read values; None if it is for all inputs.
    decisions: what the sequential program decides by values, which says what a path is.
    guesses: how the ranks' parameters are taken to be split because of their shapes alone; of a refuted check, also with which
    other layout nothing differs.
    """

    verdict: str
    relation: OutputRelation = field(default_factory=OutputRelation)
    findings: list[Finding] = field(default_factory=list)
    counterexample: Counterexample | None = None
    conjecture: dict[str, str] = field(default_factory=dict)
    assumptions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)
    opaque: list[str] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    stopped: tuple[Stop, ...] = ()
    paths: int | None = None
    decisions: tuple[Choice, ...] = ()
    guesses: list[str] = field(default_factory=list)
    make_listing: Callable[[], list[ListedProgram]] | None = field(default=None, repr=False, compare=False)
    programs: list[ListedProgram] | None = field(default=None, repr=False, compare=False)

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
            conditions=proof.conditions,
            notes=[relation.note for relation in proof.relations.values() if relation.note],
            opaque=list(proof.opaque),
            stopped=proof.stopped,
            make_listing=proof.listing,
        )

    @property
    def verified(self) -> bool:
        """Whether the verdict is "verified"."""
        return self.verdict == "verified"

    @property
    def headline(self) -> str:
        """The verdict with its conditions, and with its paths: `verified along 5 paths where x != 0, model.py:12`."""
        if not self.verified:
            return self.verdict
        along = "" if self.paths is None else f" along {self.paths} {'path' if self.paths == 1 else 'paths'}"
        return f"{self.verdict}{along}{self._where()}"

    def _where(self) -> str:
        if not self.conditions:
            return ""
        said = [str(condition) for condition in self.conditions[:SHOWN_CONDITIONS]]
        more = len(self.conditions) - len(said)
        return f" where {' and '.join(said)}{f', and {more} more' if more else ''}"

    @property
    def gist(self) -> str:
        """The verdict and the first finding in one line: `refuted: GG202 at layers.2.mlp (tp.py:37): out: ...`."""
        if not self.findings:
            return self.headline
        first = self.findings[0]
        where = first.distributed or first.sequential
        return f"{self.headline}: {first.code}{f' at {where.told}' if where is not None else ''}: {first.message}"

    def __repr__(self) -> str:
        return f"<Report {self.gist}>"

    def raise_if_not_verified(self) -> None:
        """Raise a `NotVerifiedError` that has the report."""
        if not self.verified:
            raise NotVerifiedError(self)

    def to_plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "verdict": self.verdict,
            "relation": self.relation.to_plain(),
            "findings": [finding.to_plain() for finding in self.findings],
            "counterexample": None if self.counterexample is None else self.counterexample.to_plain(),
            "conjecture": self.conjecture,
            "assumptions": self.assumptions,
            "conditions": [condition.to_plain() for condition in self.conditions],
            "paths": self.paths,
            "decisions": [choice.to_plain() for choice in self.decisions],
            "notes": self.notes,
            "parameters": self.parameters,
            "guesses": self.guesses,
            "opaque": self.opaque,
            "stopped": [stop.to_plain() for stop in self.stopped],
            "stats": self.stats,
        }

    def to_json(self) -> str:
        """All of the report, versioned; docs/report-schema.json has the schema."""
        return json.dumps({"version": VERSION, **self.to_plain()}, indent=2)

    def to_sarif(self) -> str:
        """SARIF 2.1.0, with a result per finding."""
        from graphguard.render.sarif import sarif

        return json.dumps(sarif(self._as_one_check()), indent=2)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one page that needs no network: the verdict, the operations of both programs, pictures, the counterexample."""
        from graphguard.render.html import page
        from graphguard.render.write import write_text

        write_text(path, page(self))

    def _repr_html_(self) -> str:
        from graphguard.render.html import fragment

        return fragment(self)

    def _as_one_check(self) -> dict[str, Any]:
        check = {"name": "verify", "file": None, "line": None, "expect": "verified", "strict": False}
        return {"version": VERSION, "checks": [{**check, **self.to_plain(), "error": None}]}

    @property
    def listing(self) -> list[ListedProgram]:
        """The operations of both programs, with the relation at each one; worked out when it is first asked for."""
        if self.programs is None:
            self.programs = self.make_listing() if self.make_listing is not None else []
            self.make_listing = None  # it holds on to all descriptions
        return self.programs

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "make_listing": None}

    def lines(self, verbose: bool = False) -> list[str]:
        """What the verdict rests on, as text."""
        from graphguard.render.terminal import Look, report_lines, shown

        look = Look(verbose=verbose)
        return shown(report_lines(self, look), look)

    def __str__(self) -> str:
        return "\n".join([self.headline, *(f"  {line}".rstrip() for line in self.lines())])


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """What several ranks show alike is one finding."""
    ranks: dict[Finding, list[int]] = {}
    for finding in findings:
        ranks.setdefault(replace(finding, ranks=()), []).extend(finding.ranks)
    return [replace(finding, ranks=tuple(sorted(set(shown)))) for finding, shown in ranks.items()]
