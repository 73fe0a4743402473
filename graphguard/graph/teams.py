"""Who communicates with whom, classes at a time: groups that are met at the same calls, and the other side of messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from graphguard.graph.collectives import MESSAGES
from graphguard.graph.rank_class import Numbers
from graphguard.graph.turns import Calls, Labels, Parting, Talk
from graphguard.graph.world import Peer


# ---------------------------------------------------------------------- who meets whom
@dataclass(eq=False)
class Team:
    """Groups that are met at the same calls: by class, its calls. Each class has one kind of them."""

    calls: dict[int, Calls]
    labels: list[int]
    members: Numbers  # a row for each label


def teams_of(talks: Sequence[Talk], labels: Labels) -> dict[int, Team]:
    """By calls, their team."""
    all_calls = [calls for talk in talks for calls in talk.of_kind(None)]
    joined = _Joined()
    distinct = [np.unique(calls.labels).tolist() for calls in all_calls]
    for its in distinct:
        joined.join(its)
    gathered: dict[int, list[tuple[Calls, list[int]]]] = defaultdict(list)
    for calls, its in zip(all_calls, distinct, strict=True):
        gathered[joined.root(its[0])].append((calls, its))
    found: dict[int, Team] = {}
    for together in gathered.values():
        team = _team(together, labels)
        found |= {id(calls): team for calls, _ in together}
    return found


class _Joined(dict[int, int]):
    """Labels that are in one set with others, each with another one on the way to the first."""

    def root(self, label: int) -> int:
        while self.setdefault(label, label) != label:
            self[label] = label = self.setdefault(self[label], self[label])
        return label

    def join(self, labels: Sequence[int]) -> None:
        first = self.root(labels[0])
        for label in labels[1:]:
            self[self.root(label)] = first


def _team(together: Sequence[tuple[Calls, list[int]]], labels: Labels) -> Team:
    distinct = sorted({label for _, its in together for label in its}, key=lambda each: labels.members_of(each)[0])
    rows = [labels.members_of(label) for label in distinct]
    by_class = {calls.number: calls for calls, _ in together}
    one_size = len({len(row) for row in rows}) == 1
    if len(by_class) == len(together) and one_size and len(np.unique(np.concatenate(rows))) == sum(map(len, rows)):
        return Team(by_class, distinct, np.stack(rows))
    for calls, its in together:
        if len(its) > 1:
            raise Parting(calls.number, _apart(calls, its, labels))
    calls = next(calls for calls, _ in together if len(calls.labels) > 1)  # the same group, now at one call, now at another
    raise Parting(calls.number, np.arange(len(calls.labels)))


def _apart(calls: Calls, distinct: Sequence[int], labels: Labels) -> Numbers:
    """Lanes in as few parts as have groups of one size that share no rank; if that is all of them, one part for each group."""
    taken: list[tuple[int, set[int]]] = []
    part_of: dict[int, int] = {}
    for label in distinct:
        group = labels.members_of(label).tolist()
        fits = (n for n, (size, ranks) in enumerate(taken) if size == len(group) and ranks.isdisjoint(group))
        part_of[label] = number = next(fits, len(taken))
        if number == len(taken):
            taken.append((len(group), set()))
        taken[number][1].update(group)
    if len(taken) == 1:
        return calls.labels
    return np.array([part_of[label] for label in calls.labels.tolist()], dtype=np.int64)


# ---------------------------------------------------------------------- who hears from whom
@dataclass(eq=False)
class Way:
    """The other side of messages: by lane, the calls there, by their number in `sides`, and the lane; -1 if there is none."""

    sides: list[Calls]
    side: Numbers
    lane: Numbers

    def peers(self, turn: int) -> Iterator[Peer]:
        """Of the messages of one turn, those sides that there are."""
        for number in dict.fromkeys(self.side.tolist()):
            if number >= 0 and turn < len(self.sides[number].positions):
                here = np.flatnonzero(self.side == number)
                calls = self.sides[number]
                yield Peer((calls.number, calls.positions[turn]), here, self.lane[here])


def ways_of(talks: Sequence[Talk]) -> dict[int, Way]:
    """By calls, where their messages go to, or come from."""
    found: dict[int, Way] = {}
    for op, other in (MESSAGES, MESSAGES[::-1]):
        sides = [calls for talk in talks for calls in talk.of_kind(other)]
        for talk in talks:
            found |= {id(calls): _way(calls.labels, sides) for calls in talk.of_kind(op)}
    return found


def _way(labels: Numbers, sides: list[Calls]) -> Way:
    side, lane = np.full(len(labels), -1), np.full(len(labels), -1)
    for number, other in enumerate(sides):  # a label has one sender and one receiver, so that it is found once
        _, here, there = np.intersect1d(labels, other.labels, assume_unique=True, return_indices=True)
        side[here], lane[here] = number, there
    return Way(sides, side, lane)
