"""What is wrong with classes of ranks that do not come to their end, or whose communication is not complete then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphguard.graph.class_play import Play, State
from graphguard.graph.collectives import MESSAGES, NEW_GROUP
from graphguard.graph.findings import Finding
from graphguard.graph.ir import Node
from graphguard.graph.matching import Match, deadlock, never_joined
from graphguard.graph.world import Place


@dataclass
class _Wait:
    """What a rank waits for: who is missing, and who of these never comes."""

    rank: int
    match: Match
    absent: list[int]
    never: list[int]

    def finding(self) -> Finding:
        return never_joined(self.match, self.rank, self.never[0])


def stuck(play: Play) -> Finding:
    """Ranks wait, and nothing moves."""
    waits = {int(state.talk.ranks[0]): _wait(play, state, 0) for state in play.waiting()}
    for wait in waits.values():
        if wait.never:
            return wait.finding()
    path = [next(iter(waits))]
    while True:
        if path[-1] not in waits:
            waits[path[-1]] = _wait(play, play.states[play.world.class_of[path[-1]]], int(play.world.lane_of[path[-1]]))
        wait = waits[path[-1]]
        if wait.never:
            return wait.finding()
        following = wait.absent[0]
        if following in path:
            return deadlock({rank: waits[rank].match for rank in path[path.index(following) :]})
        path.append(following)


def _wait(play: Play, state: State, lane: int) -> _Wait:
    rank, number = int(state.talk.ranks[lane]), state.talk.number
    _, node = state.talk.nodes[state.place]
    if node.op == NEW_GROUP:
        group: tuple[int, ...] = node.kwargs["group"]  # type: ignore[assignment]
        absent = [each for each in group if play.world.class_of[each] not in play.makers(node)]
        never = [each for each in absent if not _makes(play.states[play.world.class_of[each]], node)]
        return _Wait(rank, Match(0, node.op, group, {rank: node}), absent, never)
    started = state.works[node.kwargs["work"]]
    return _incomplete(play, next((number, p) for p in started if not play.complete((number, p))[lane]), lane)


def _makes(state: State, group: Node) -> bool:
    """Whether a class has yet to make a group."""
    same = ("name", "group")
    return any(
        node.op == NEW_GROUP and all(node.kwargs[key] == group.kwargs[key] for key in same)
        for _, node in state.talk.nodes[state.place :]
    )


def _incomplete(play: Play, place: Place, lane: int) -> _Wait:
    """A communication that some have not begun, as one rank has it."""
    held = play.classes[place[0]]
    calls, turn = play.states[place[0]].talk.calls[place[1]]
    rank = int(held.ranks[lane])
    node = play.alone(rank, place)
    if node.op in MESSAGES:
        peer: int = node.kwargs["peer"]  # type: ignore[assignment]
        ends = (rank, peer) if node.op == "dist.send" else (peer, rank)
        comes = any(lane in each.here for each in play.ways[id(calls)].peers(turn))
        return _Wait(rank, Match(0, "dist.send", ends, {rank: node}), [peer], [] if comes else [peer])
    team = play.teams[id(calls)]
    row = team.labels.index(int(calls.labels[lane]))
    absent = team.members[row][~play.present(team, turn)[row]].tolist()
    never = [each for each in absent if play.states[play.world.class_of[each]].done]
    return _Wait(rank, Match(0, node.op, tuple(team.members[row].tolist()), {rank: node}), absent, never)


def left_over(play: Play) -> Iterator[Finding]:
    """All have come to their end, and something was never waited for."""
    told: set[int] = set()
    for state in play.states:
        for position, (calls, _) in state.talk.calls.items():
            complete = play.complete((state.talk.number, position))
            team = id(play.teams.get(id(calls), calls))
            if not complete.all() and team not in told:
                told.add(team)
                yield _incomplete(play, (state.talk.number, position), int(complete.argmin())).finding()
