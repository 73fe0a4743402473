"""What GraphGuard can find wrong with a program: a closed list of kinds, each with a code that `graphguard explain` knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from graphguard.ir import Source

PHASES = ("forward", "backward", None)


class Kind(NamedTuple):
    code: str
    name: str
    meaning: str

    @property
    def of_communication(self) -> bool:
        """Whether the fault is one of the ranks among themselves, seen without the sequential program."""
        return self.code.startswith("GG1")


KINDS = {
    kind.name: kind
    for kind in (
        Kind("GG101", "collective-mismatch", "Ranks of one group call different collectives, or the same one with "
             "another shape, dtype, reduce operation, root or order."),
        Kind("GG102", "unmatched-message", "A send has no receive, or a receive has no send."),
        Kind("GG103", "deadlock", "Ranks wait for each other in a cycle, or for a rank that has finished."),
        Kind("GG104", "race", "A buffer is used between the start of asynchronous communication and its wait."),
        Kind("GG105", "strided-buffer", "Communication on a buffer that is not contiguous: backends disagree on what it "
             "means."),
        Kind("GG106", "outside-group", "A rank calls a collective of a group that it does not belong to; torch warns and "
             "does nothing."),
        Kind("GG201", "relation-lost", "The first sequential operation whose result no clean expression of the ranks' "
             "values covers, though its operands have one: from here on the two programs were not shown to agree."),
        Kind("GG202", "unexplained-output", "A rank returns a value that is neither the whole sequential output, nor a tile "
             "of it, nor a summand of it."),
        Kind("GG203", "scaled-copies", "The ranks' values add up to the sequential output only because each is the same "
             "fraction of it: copies, not parts of a reduction."),
        Kind("GG204", "missing-output", "The sequential program returns an output that no rank returns."),
        Kind("GG205", "unexpected-relation", "The ranks hold the output by a clean relation, but not by the one that "
             "`outputs=` states."),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One fault.

    ranks: those that show it.
    sources: the lines involved, the most telling first.
    sequential, distributed: where it is in either program. What is missing is located where the wrong value is first used.
    phase: "forward" or "backward", where it is known.
    repair: what to change, where it is known.
    """

    kind: str
    message: str
    ranks: tuple[int, ...] = ()
    sources: tuple[Source, ...] = ()
    sequential: Source | None = None
    distributed: Source | None = None
    phase: str | None = None
    repair: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind of finding {self.kind!r}")
        if self.phase not in PHASES:
            raise ValueError(f"unknown phase {self.phase!r}")
        if self.distributed is None and self.sources and KINDS[self.kind].of_communication:
            object.__setattr__(self, "distributed", self.sources[0])

    @property
    def code(self) -> str:
        return KINDS[self.kind].code

    def to_plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "code": self.code,
            "kind": self.kind,
            "message": self.message,
            "sequential": None if self.sequential is None else str(self.sequential),
            "distributed": None if self.distributed is None else str(self.distributed),
            "phase": self.phase,
            "repair": self.repair,
            "ranks": list(self.ranks),
            "sources": [str(source) for source in self.sources],
        }

    def __str__(self) -> str:
        return f"{self.code} {self.kind}: {self.message}"
