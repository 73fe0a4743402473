"""What GraphGuard can find wrong with a program: a closed list of kinds, each with a code that `graphguard explain` knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from graphguard.ir import Source


class Kind(NamedTuple):
    code: str
    name: str
    meaning: str


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
    )
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One fault, with the ranks that show it and the lines involved, the most telling first."""

    kind: str
    message: str
    ranks: tuple[int, ...]
    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind of finding {self.kind!r}")

    @property
    def code(self) -> str:
        return KINDS[self.kind].code

    def __str__(self) -> str:
        return f"{self.code} {self.kind}: {self.message}"
