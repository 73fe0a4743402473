"""What a proof found: plain data for reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from graphguard.graph.findings import Finding
from graphguard.graph.ir import Source
from graphguard.graph.limits import Stop
from graphguard.graph.listing import ListedProgram
from graphguard.graph.placement import Placements, parse
from graphguard.relation.arrangement import Arrangement


@dataclass(frozen=True)
class Relation:
    """How a sequential output is rebuilt from the ranks' outputs by clean operations."""

    path: str
    text: str  # a clean expression: `y = concat(rank0.y, rank1.y, dim=-1)`
    placements: tuple[tuple[str, str], ...] | None = None  # one per mesh axis, where that form exists: ("tp", "Shard(1)")
    type: str | None = None  # `f32[8, 64@tp]`, where that form exists
    note: str | None = None
    arrangement: Arrangement | None = None  # the tiles, where they are not those of placements

    @property
    def placed(self) -> Placements | None:
        """The placements as values."""
        return None if self.placements is None else parse(text for _, text in self.placements)


@dataclass(frozen=True)
class Condition:
    """What must hold so that an operation of the ranks is defined, of which the sequential program says nothing."""

    text: str  # `x != 0`
    source: Source | None  # the line of the operation: `model.py:12`
    outputs: tuple[str, ...] = ()  # that are made from its result

    def __str__(self) -> str:
        return self.text if self.source is None else f"{self.text}, {self.source}"

    def to_plain(self) -> dict[str, Any]:
        return {"text": self.text, "source": None if self.source is None else str(self.source), "outputs": list(self.outputs)}


@dataclass
class Proof:
    """The relations that were proved, and why the other outputs have none."""

    relations: dict[str, Relation] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)  # the most telling first; empty if all is proved
    assumptions: list[str] = field(default_factory=list)
    conditions: tuple[Condition, ...] = ()  # under which the relations hold
    opaque: list[str] = field(default_factory=list)  # operators that no lemma describes, which the proof met
    listing: Callable[[], list[ListedProgram]] | None = None  # the operations of both programs with the relation at each one
    operations: int = 0
    seconds: float = 0.0
    stopped: tuple[Stop, ...] = ()  # limits that were reached on the way to outputs without a relation
    no_parts: dict[str, str] = field(default_factory=dict)  # outputs that are sums over ranks of no true parts: which kind

    @property
    def unconditional(self) -> dict[str, Relation]:
        """The relations that hold wherever the sequential program is defined."""
        conditional = {path for condition in self.conditions for path in condition.outputs}
        return {path: relation for path, relation in self.relations.items() if path not in conditional}

    @property
    def proved(self) -> bool:
        return not self.findings
