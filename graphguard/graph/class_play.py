"""Classes of ranks side by side: each goes on until some of its ranks have to wait for another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graphguard.graph.agreement import disagreement, form, inconsistency, other_members, pairwise
from graphguard.graph.collectives import MESSAGES, NEW_GROUP, WAIT
from graphguard.graph.ir import Mesh, Node
from graphguard.graph.matching import disagree, not_in_itself, to_itself
from graphguard.graph.rank_class import Numbers, PerRank, RankClass, node_at, numbers_in
from graphguard.graph.teams import Team, teams_of, ways_of
from graphguard.graph.turns import Calls, Labels, Parting, Talk, talk_of
from graphguard.graph.world import Meeting, Messages, Place, World

_NEVER = 1 << 60  # a position that no class comes to


@dataclass
class State:
    """How far a class has come. works: the positions of what was started, by work."""

    talk: Talk
    place: int = 0
    works: dict[object, list[int]] = field(default_factory=lambda: defaultdict(list))

    @property
    def done(self) -> bool:
        return self.place == len(self.talk.nodes)

    @property
    def position(self) -> int:
        """All operations before it were started."""
        return _NEVER if self.done else self.talk.nodes[self.place][0]


class Play:
    """All classes side by side."""

    def __init__(self, classes: Sequence[RankClass], mesh: Mesh):
        self.classes, self.mesh = classes, mesh
        labels = Labels()
        talks = [talk_of(number, each, labels) for number, each in enumerate(classes)]
        self.teams, self.ways = teams_of(talks, labels), ways_of(talks)
        self.states = [State(talk) for talk in talks]
        self.world = World(mesh, classes)
        self.made: dict[object, list[Place]] = defaultdict(list)  # groups, by name: who has come to make one

    def run(self) -> None:
        while sum(self._advance(state) for state in self.states) > 0:
            pass
        for state in self.waiting():
            free = self._free(state)
            if free.any():  # some of its ranks could go on
                raise Parting(state.talk.number, free.astype(np.int64))

    def waiting(self) -> list[State]:
        return [state for state in self.states if not state.done]

    def _advance(self, state: State) -> bool:
        """Play one class until some of its ranks have to wait."""
        moved = False
        while not state.done:
            position, node = state.talk.nodes[state.place]
            if node.op == NEW_GROUP:
                self._come_to_group((state.talk.number, position), node)
            if node.op in (WAIT, NEW_GROUP):
                if not self._free(state).all():
                    break
                state.place += 1
            else:
                self._start(state, position, node)
            moved = True
        return moved

    def _start(self, state: State, position: int, node: Node) -> None:
        place, held = (state.talk.number, position), self.classes[state.talk.number]
        if node.op in MESSAGES:
            for lane in np.flatnonzero(numbers_in(node.kwargs["peer"], held.lanes) == held.ranks)[:1].tolist():
                raise to_itself(int(held.ranks[lane]), node_at(node, lane))
        else:
            self._require_sense(state.talk, position, node)
        state.works[node.kwargs["work"]].append(position)
        state.place += 1
        for other, pairs in self._met(place):
            if self.begun(other):
                for ranks in pairs:
                    self._compare(ranks, place, other)

    def begun(self, place: Place) -> bool:
        return place[1] < self.states[place[0]].position

    # ------------------------------------------------------------------ waiting
    def _free(self, state: State) -> Numbers:
        """By lane, whether the operation that the class waits at lets it go on."""
        _, node = state.talk.nodes[state.place]
        if node.op == NEW_GROUP:
            return self.is_made(node) | ~np.isin(state.talk.ranks, members_made(node))
        free = np.ones(len(state.talk.ranks), dtype=bool)
        for started in state.works[node.kwargs["work"]]:
            free &= self.complete((state.talk.number, started))
        return free

    def complete(self, place: Place) -> Numbers:
        """By lane, whether all that take part in its communication have begun it."""
        calls, turn = self.states[place[0]].talk.calls[place[1]]
        way = self.ways.get(id(calls))
        if way is not None:
            found = np.zeros(len(calls.labels), dtype=bool)
            for peer in way.peers(turn):
                found[peer.here] = self.begun(peer.place)
            return found
        team = self.teams[id(calls)]
        here: Numbers = np.asarray(self.present(team, turn).all(axis=1))
        if here.all():
            return np.ones(len(calls.labels), dtype=bool)
        done = dict(zip(team.labels, here.tolist(), strict=True))
        return np.array([done[label] for label in calls.labels.tolist()])

    def present(self, team: Team, turn: int) -> Numbers:
        """By group and member, whether the member has begun its call of this turn."""
        begun = np.full(self.mesh.size, -1)  # by rank, the label that it has begun
        for number, calls in team.calls.items():
            if turn < len(calls.positions) and self.begun((number, calls.positions[turn])):
                begun[self.classes[number].ranks] = calls.labels
        return np.asarray(begun[team.members] == np.array(team.labels)[:, None])

    # ------------------------------------------------------------------ groups that are made
    def _come_to_group(self, place: Place, node: Node) -> None:
        """Members look for each other by the name of their group. One that is alone in it looks for nobody."""
        if not np.isin(self.classes[place[0]].ranks, members_made(node)).any():
            return
        others = self.made[node.kwargs["name"]]
        for other in others:
            its = self.world.node(other)
            alone = len(members_made(its)) == len(members_made(node)) == 1
            if its.kwargs["group"] != node.kwargs["group"] and not alone:
                words = ("collective-mismatch", other_members(its, node))
                raise disagree(self._one_inside(other), its, self._one_inside(place), node, words)
        if place not in others:
            others.append(place)

    def _one_inside(self, place: Place) -> int:
        ranks = self.classes[place[0]].ranks
        return int(ranks[np.isin(ranks, members_made(self.world.node(place)))][0])

    def makers(self, node: Node) -> list[int]:
        """The classes that have come to make a group."""
        places = self.made[node.kwargs["name"]]
        return [place[0] for place in places if self.world.node(place).kwargs["group"] == node.kwargs["group"]]

    def is_made(self, node: Node) -> bool:
        return bool(np.isin(self.world.class_of[members_made(node)], self.makers(node)).all())

    # ------------------------------------------------------------------ whether they mean the same
    def _require_sense(self, talk: Talk, position: int, node: Node) -> None:
        """Of a call in itself; where members have parts of their own, at each place in the group."""
        calls, _ = talk.calls[position]
        places = self._places(calls) if pairwise(node) else np.zeros(len(talk.ranks), dtype=np.int64)
        _, lanes = np.unique(places, return_index=True)
        for lane in lanes.tolist():
            rank, alone = int(talk.ranks[lane]), node_at(node, lane)
            problem = inconsistency(tuple(alone.kwargs["group"]), rank, alone)  # type: ignore[arg-type]
            if problem is not None:
                raise not_in_itself(rank, alone, problem)

    def _places(self, calls: Calls) -> Numbers:
        """By lane, the place in its group."""
        found, members = np.empty(self.mesh.size, dtype=np.int64), self.teams[id(calls)].members
        found[members] = np.arange(members.shape[1])
        return found[self.classes[calls.number].ranks]

    def _met(self, place: Place) -> Iterator[tuple[Place, Iterator[tuple[int, int]]]]:
        """Operations that a call meets, each with ranks here and there that may disagree."""
        calls, turn = self.states[place[0]].talk.calls[place[1]]
        way = self.ways.get(id(calls))
        for peer in () if way is None else way.peers(turn):
            ranks = self.classes[place[0]].ranks[peer.here[0]], self.classes[peer.place[0]].ranks[peer.there[0]]
            yield peer.place, iter([(int(ranks[0]), int(ranks[1]))])
        team = None if way is not None else self.teams[id(calls)]
        for number, its in () if team is None else team.calls.items():
            if turn < len(its.positions):
                other = (number, its.positions[turn])
                yield other, self._pairs(team, place, other)  # type: ignore[arg-type]

    def _pairs(self, team: Team, place: Place, other: Place) -> Iterator[tuple[int, int]]:
        """Members of one group, of two classes. Of ranks that show the same to all others, one of each class is enough; if what
        they show depends on their place alone, one for each two places."""
        nodes = [self.world.node(each) for each in (place, other)]
        mine, its = (self.world.class_of[team.members] == number for number, _ in (place, other))
        if any(map(_differs, nodes)):
            for row, a, b in np.argwhere(mine[:, :, None] & its[:, None, :]).tolist():
                yield int(team.members[row, a]), int(team.members[row, b])
            return
        if not pairwise(nodes[0]) or all(form(node) is not None for node in nodes):
            row = int((mine.any(axis=1) & its.any(axis=1)).argmax())
            here, there = np.flatnonzero(mine[row]), np.flatnonzero(its[row])
            for b in there[there != here[0]][:1].tolist() if len(here) else ():
                yield int(team.members[row, here[0]]), int(team.members[row, b])
            return
        together = mine.T.astype(np.int64) @ its.astype(np.int64)  # by place and place
        np.fill_diagonal(together, 0)
        for a, b in np.argwhere(together).tolist():
            row = int(np.flatnonzero(mine[:, a] & its[:, b])[0])
            yield int(team.members[row, a]), int(team.members[row, b])

    def _compare(self, ranks: tuple[int, int], place: Place, other: Place) -> None:
        mine, its = (self.alone(*each) for each in zip(ranks, (place, other), strict=True))
        problem = disagreement(tuple(mine.kwargs["group"]), ranks[1], its, ranks[0], mine)  # type: ignore[arg-type]
        if problem is not None and ranks[0] != ranks[1]:
            raise disagree(ranks[1], its, ranks[0], mine, problem)

    def alone(self, rank: int, place: Place) -> Node:
        """An operation as one rank has it."""
        return node_at(self.world.node(place), int(self.world.lane_of[rank]))

    # ------------------------------------------------------------------ what is found
    def calls(self) -> dict[Place, Meeting | Messages]:
        found: dict[Place, Meeting | Messages] = {}
        meetings: dict[tuple[int, int], Meeting] = {}
        for state in self.states:
            for position, (calls, turn) in state.talk.calls.items():
                way = self.ways.get(id(calls))
                if way is not None:
                    found[state.talk.number, position] = Messages(tuple(way.peers(turn)))
                    continue
                team = self.teams[id(calls)]
                if (id(team), turn) not in meetings:
                    places = tuple((number, its.positions[turn]) for number, its in team.calls.items())
                    meetings[id(team), turn] = Meeting(team.members, places)
                found[state.talk.number, position] = meetings[id(team), turn]
        return found


def members_made(node: Node) -> Numbers:
    """The ranks of a group that is made."""
    return np.array(node.kwargs["group"], dtype=np.int64)


def _differs(node: Node) -> bool:
    """Whether ranks of a class may show others different things, wherever they stand."""
    return any(_has_numbers(node.kwargs.get(name)) for name in ("root", "input_splits", "output_splits"))


def _has_numbers(arg: Any) -> bool:
    return type(arg) is PerRank or (type(arg) is tuple and any(map(_has_numbers, arg)))
