"""The operations of both programs as a list for people, with the relation at each one where it is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphguard.graph.ir import Graph, Node, Source

if TYPE_CHECKING:
    from graphguard.graph.rank_class import RankClass

# What is known of an operation's results: the other program has them, or not; they have no description; nothing was asked.
STATES = ("related", "unrelated", "undescribed", "unknown")
Relate = Callable[[Node], tuple[str, str]]  # the state, and the relation in words


@dataclass(frozen=True)
class Operation:
    number: int
    operator: str
    text: str  # the call, without its source
    source: Source | None
    backward: bool
    state: str
    relation: str  # in words; why there is none, where there is none

    @property
    def module(self) -> str:
        return "" if self.source is None else self.source.module


@dataclass(frozen=True)
class ListedProgram:
    """`ranks` is empty for the sequential program."""

    name: str
    ranks: tuple[int, ...]
    operations: tuple[Operation, ...]


def unknown(node: Node) -> tuple[str, str]:
    return "unknown", ""


def listed(name: str, ranks: tuple[int, ...], graph: Graph, relate: Relate = unknown) -> ListedProgram:
    """The inputs, and all operations but waits, which have no result. Inputs have numbers below 0."""
    operations = []
    inputs = [Node("input", (name,), {}, (value,)) for name, value in graph.inputs.items()]
    for number, node in enumerate([*inputs, *graph.nodes], -len(inputs)):
        if node.op != "dist.wait":
            text = str(node).split("  # ", 1)[0] if node.source else str(node)
            state, relation = relate(node)
            operations.append(Operation(number, node.op, text, node.source, node.backward, state, relation))
    return ListedProgram(name, ranks, tuple(operations))


def without_relations(sequential: Graph, held: Sequence[RankClass]) -> list[ListedProgram]:
    """Of ranks whose communication does not fit together: nothing was asked of their values."""
    ranks = [listed(in_words(each.members), each.members, each.graph) for each in held]
    return [listed("sequential", (), sequential), *ranks]


def in_words(ranks: tuple[int, ...]) -> str:
    """`rank 3`, `ranks 0 to 3`, `ranks 0, 2, 5`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:6]))
    return f"ranks {shown}{f' and {len(ranks) - 6} more' if len(ranks) > 6 else ''}"
