"""What is shown, as this room sees it: a report, and the outcome of a check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from graphguard.engine.proof import Condition, Relation
from graphguard.graph.findings import Finding
from graphguard.graph.limits import Stop
from graphguard.graph.listing import ListedProgram
from graphguard.oracle.difference import Counterexample

SHOWN_CONDITIONS = 2  # beside a verdict


class ShownReport(Protocol):
    """`graphguard.Report` says what each is."""

    verdict: str
    findings: list[Finding]
    counterexample: Counterexample | None
    conjecture: dict[str, str]
    assumptions: list[str]
    notes: list[str]
    parameters: dict[str, str]
    guesses: list[str]
    opaque: list[str]
    stats: dict[str, Any]
    conditions: tuple[Condition, ...]
    stopped: tuple[Stop, ...]
    paths: int | None

    @property
    def decisions(self) -> Sequence[object]: ...

    programs: list[ListedProgram] | None

    @property
    def relation(self) -> Mapping[str, Relation]: ...
    @property
    def verified(self) -> bool: ...
    @property
    def headline(self) -> str: ...
    @property
    def listing(self) -> list[ListedProgram]: ...


class ShownCheck(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def expect(self) -> str: ...


class ShownOutcome(Protocol):
    """A check that has run: its report, or the error that kept it from having one."""

    @property
    def check(self) -> ShownCheck: ...
    @property
    def report(self) -> ShownReport | None: ...
    @property
    def error(self) -> Exception | None: ...
    @property
    def complaint(self) -> str: ...
    @property
    def as_expected(self) -> bool: ...
    @property
    def has_forbidden_conditions(self) -> bool: ...
