"""What GraphGuard can find wrong with a program: a closed list of kinds, each with a code that `graphguard explain` knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from graphguard.graph.ir import Source
from graphguard.graph.tensor_layout import TensorLayout

PHASES = ("forward", "backward", None)


class Kind(NamedTuple):
    """meaning: what a finding of this kind says. law: what was broken, in one sentence. `render/explain.py` has more."""

    code: str
    name: str
    meaning: str
    law: str

    @property
    def of_communication(self) -> bool:
        """Whether the fault is one of the ranks among themselves, seen without the sequential program."""
        return self.code.startswith("GG1")


KINDS = {
    kind.name: kind
    for kind in (
        Kind("GG101", "collective-mismatch", "Ranks of one group call different collectives, or the same one with "
             "another size, dtype, reduce operation, root or order; or they do not make their groups together.",
             "All ranks of a group make the same calls, in the same order, on buffers that fit."),
        Kind("GG102", "unmatched-message", "A send has no receive, or a receive has no send.",
             "Every send has its receive, and every receive its send."),
        Kind("GG103", "deadlock", "Ranks wait for each other in a cycle, or for a rank that has finished.",
             "Ranks that wait must wait for something that still comes."),
        Kind("GG104", "race", "A buffer is used between the start of asynchronous communication and its wait.",
             "A buffer belongs to the communication until it has been waited for."),
        Kind("GG105", "strided-buffer", "Communication on a buffer that is not contiguous: backends disagree on what it "
             "means.",
             "Communication needs buffers whose memory has one meaning for all ranks."),
        Kind("GG106", "outside-group", "A rank calls a collective of a group that it does not belong to; torch warns and "
             "does nothing.",
             "Only the members of a group take part in its collectives."),
        Kind("GG201", "relation-lost", "The first sequential operation whose result no clean expression of the ranks' "
             "values covers, though its operands have one: from here on the two programs were not shown to agree.",
             "From operands that the ranks hold as copies, tiles or summands must come a result that they hold so."),
        Kind("GG202", "unexplained-output", "A rank returns a value that is neither the whole sequential output, nor a tile "
             "of it, nor a summand of it.",
             "Every rank's output must be the sequential output, a tile of it, or a summand of it."),
        Kind("GG203", "scaled-copies", "The ranks' values add up to the sequential output only because each is the same "
             "fraction of it: copies, not parts of a reduction.",
             "A sum over ranks must be one of true parts, not of N copies of a value that was divided by N."),
        Kind("GG204", "missing-output", "The sequential program returns an output that no rank returns, or of which a part is "
             "on no rank that returns it; or a rank that holds a parameter has no gradient of it.",
             "All of every output of the sequential program must be returned by some rank."),
        Kind("GG205", "unexpected-relation", "The ranks hold the output by a clean relation, but not by the one that "
             "`outputs=` states.",
             "An output must be held as its users read it, which is what `outputs=` states."),
        Kind("GG206", "undefined-value", "The relation is proved only where what the ranks compute is defined, and at some "
             "inputs of the sequential program it is not: a division by zero, a root or a log of what has none.",
             "The ranks must be defined wherever the sequential program is."),
    )
}  # fmt: skip


PLACES = {"also": "look also at", "stops": "the proof stops at"}  # what kinds of further places a finding has, in words


@dataclass(frozen=True)
class Place:
    """A further line of the ranks. kind: "also" for where else the fault may be, "stops" for where the proof stopped."""

    kind: str
    source: Source

    def __post_init__(self) -> None:
        if self.kind not in PLACES:
            raise ValueError(f"unknown kind of place {self.kind!r}")

    @property
    def words(self) -> str:
        return PLACES[self.kind]

    def to_plain(self) -> dict[str, Any]:
        return {"kind": self.kind, "distributed": str(self.source), "module": self.source.module or None}


@dataclass(frozen=True)
class Finding:
    """One fault, with all that it spoils.

    ranks: those that show it.
    sources: the lines involved, the most telling first.
    places: further lines to look at, none twice.
    spoils: the paths of further outputs that are wrong because of it.
    detail: what stopped the proof, in the words of the prover.
    turn: the how manieth time of how many it is that the line is run there, where there are several: a microbatch, or a step.
    odd: parameters and outputs that are treated otherwise than their like, in words.
    sequential, distributed: where it is in either program. What is missing is located where the wrong value is first used.
    phase: "forward" or "backward", where it is known.
    repair: what to change, where it is known.
    law: why this very operation breaks the relation, where that is known; else the kind has one for all of its findings.
    holdings: who holds which part of the tensors in question.
    output: the path of the output that it is about, if it is about one.
    plain: whether the programs show it as they are, so that no execution is needed.
    """

    kind: str
    message: str
    ranks: tuple[int, ...] = ()
    sources: tuple[Source, ...] = ()
    sequential: Source | None = None
    distributed: Source | None = None
    phase: str | None = None
    repair: str | None = None
    law: str | None = None
    holdings: tuple[TensorLayout, ...] = ()
    output: str | None = None
    plain: bool = False
    places: tuple[Place, ...] = ()
    spoils: tuple[str, ...] = ()
    detail: str | None = None
    odd: tuple[str, ...] = ()
    turn: tuple[int, int] | None = None

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

    @property
    def needs_no_execution(self) -> bool:
        return self.plain or self.kind == "missing-output"

    @property
    def at_one_line(self) -> bool:
        """Whether both programs run the line."""
        here, there = self.sequential, self.distributed
        return here is not None and there is not None and here.place == there.place

    @property
    def module(self) -> str:
        """The path of the module that it is in, or of those: `layers.*.mlp`; empty where none is known."""
        sides = (side.module for side in (self.distributed, self.sequential) if side is not None)
        return next((module for module in sides if module), "")

    @property
    def lines(self) -> tuple[Source, ...]:
        """The lines of the ranks that it names, none twice: its own, then where else to look."""
        named = [source for source in (self.distributed, *(place.source for place in self.places)) if source is not None]
        found: dict[tuple[str, int], Source] = {}
        for source in named:
            found.setdefault(source.place, source)
        return tuple(found.values())

    def to_plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "code": self.code,
            "kind": self.kind,
            "message": self.message,
            "output": self.output,
            "sequential": None if self.sequential is None else str(self.sequential),
            "distributed": None if self.distributed is None else str(self.distributed),
            "module": self.module or None,
            "sequential_module": None if self.sequential is None else self.sequential.module or None,
            "phase": self.phase,
            "turn": None if self.turn is None else list(self.turn),
            "repair": self.repair,
            "law": self.law or KINDS[self.kind].law,
            "holdings": [holding.to_plain() for holding in self.holdings],
            "ranks": list(self.ranks),
            "sources": [str(source) for source in self.sources],
            "places": [place.to_plain() for place in self.places],
            "spoils": list(self.spoils),
            "detail": self.detail,
            "odd": list(self.odd),
        }

    def __str__(self) -> str:
        return f"{self.code} {self.kind}: {self.message}"
