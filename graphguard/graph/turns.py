"""The communication of a class of ranks, in numbers: which collective of which group, and which message, each call is.

Collectives of a group are told apart by their turn, and so are messages from one rank to another. The ranks of a class make
their calls in one order, but of groups of their own: a call is one number per rank, its label. Calls with the same labels
follow each other. Calls with the same label on some ranks only would have other turns there: such a class is parted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graphguard.graph.collectives import MESSAGES, NEW_GROUP, WAIT
from graphguard.graph.ir import Node
from graphguard.graph.rank_class import Groups, Numbers, RankClass, numbers_in

_CHANNELS = 1 << 20
_RANKS = 1 << 20


class Parting(Exception):
    """Ranks of a class that cannot be followed at once: by lane, which part it is in."""

    def __init__(self, number: int, parts: Numbers):
        super().__init__()
        self.number, self.parts = number, parts


@dataclass(eq=False)
class Calls:
    """All calls of a class with the same labels. positions: of the operations, in order, one for each turn."""

    number: int
    labels: Numbers
    positions: list[int] = field(default_factory=list)


class Labels:
    """Numbers for groups with their channels, and for ways from rank to rank."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], int] = {}
        self.members: list[Numbers] = []  # by group
        self._rows: dict[int, tuple[Numbers, Numbers]] = {}  # of an array of groups, which is kept, the numbers of its rows
        self._ways: dict[tuple[int, int], int] = {}  # a group with its channel, and a tag

    def of_groups(self, node: Node, lanes: int) -> Numbers:
        given: Any = node.kwargs["group"]
        if type(given) is Groups:
            numbers = self._numbers(given.members)[given.rows]
        else:
            numbers = np.full(lanes, self._number(given), dtype=np.int64)
        return numbers * _CHANNELS + numbers_in(node.kwargs.get("channel", 0), lanes)

    def of_messages(self, node: Node, ranks: Numbers) -> Numbers:
        """The sender comes before the receiver, whoever asks."""
        lanes = len(ranks)
        group, tag = self.of_groups(node, lanes), numbers_in(node.kwargs["tag"], lanes)
        pairs = list(zip(group.tolist(), tag.tolist(), strict=True)) if _differ(group, tag) else [(int(group[0]), int(tag[0]))]
        way = np.array([self._ways.setdefault(pair, len(self._ways)) for pair in pairs], dtype=np.int64)
        peers = numbers_in(node.kwargs["peer"], lanes)
        ends = (ranks, peers) if node.op == "dist.send" else (peers, ranks)
        return (way * _RANKS + ends[0]) * _RANKS + ends[1]

    def members_of(self, label: int) -> Numbers:
        return self.members[label // _CHANNELS]

    def _numbers(self, members: Numbers) -> Numbers:
        known = self._rows.get(id(members))
        if known is None:
            rows = np.array([self._number(tuple(row)) for row in members.tolist()], dtype=np.int64)
            known = self._rows[id(members)] = members, rows
        return known[1]

    def _number(self, group: tuple[int, ...]) -> int:
        if group not in self._groups:
            self._groups[group] = len(self.members)
            self.members.append(np.array(group, dtype=np.int64))
        return self._groups[group]


def _differ(*numbers: Numbers) -> bool:
    return any(bool((each != each[0]).any()) for each in numbers)


@dataclass
class Talk:
    """What one class communicates: the operations, and for each of them its calls and its turn."""

    number: int
    ranks: Numbers
    nodes: list[tuple[int, Node]]  # with their positions
    calls: dict[int, tuple[Calls, int]] = field(default_factory=dict)  # by position

    def of_kind(self, op: str | None) -> Iterator[Calls]:
        """Each once: those of messages by an operator, or those of groups."""
        seen: set[int] = set()
        for position, node in self.nodes:
            if position in self.calls and (node.op == op if op is not None else node.op not in MESSAGES):
                calls = self.calls[position][0]
                if id(calls) not in seen:
                    seen.add(id(calls))
                    yield calls


def talk_of(number: int, held: RankClass, labels: Labels) -> Talk:
    nodes = [(position, node) for position, node in enumerate(held.graph.nodes) if node.communicates]
    talk = Talk(number, held.ranks, nodes)
    known: dict[str, dict[bytes, Calls]] = {}
    for position, node in nodes:
        if node.op in (WAIT, NEW_GROUP):
            continue
        is_message = node.op in MESSAGES
        made = labels.of_messages(node, held.ranks) if is_message else labels.of_groups(node, held.lanes)
        alike = known.setdefault(node.op if is_message else "", {})
        calls = alike.get(made.tobytes())
        if calls is None:
            for other in alike.values():
                shared = other.labels == made
                if shared.any():
                    raise Parting(number, shared.astype(np.int64))
            calls = alike[made.tobytes()] = Calls(number, made)
        talk.calls[position] = calls, len(calls.positions)
        calls.positions.append(position)
    return talk
