"""What a proof found: plain data for reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from graphguard.arrangement import Arrangement
from graphguard.findings import Finding
from graphguard.listing import Program


@dataclass(frozen=True)
class Relation:
    """How a sequential output is rebuilt from the ranks' outputs by clean operations."""

    path: str
    text: str  # a clean expression: `y = concat(rank0.y, rank1.y, dim=-1)`
    placements: tuple[tuple[str, str], ...] | None = None  # one per mesh axis, where that form exists: ("tp", "Shard(1)")
    type: str | None = None  # `f32[8, 64@tp]`, where that form exists
    note: str | None = None
    arrangement: Arrangement | None = None  # the tiles, where they are not those of placements


@dataclass
class Proof:
    """The relations that were proved, and why the other outputs have none."""

    relations: dict[str, Relation] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)  # the most telling first; empty if all is proved
    assumptions: list[str] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)  # operators that no lemma describes, which the proof met
    listing: Callable[[], list[Program]] | None = None  # the operations of both programs with the relation at each one
    operations: int = 0
    seconds: float = 0.0
    no_parts: dict[str, str] = field(default_factory=dict)  # outputs that are sums over ranks of no true parts: which kind

    @property
    def proved(self) -> bool:
        return not self.findings
