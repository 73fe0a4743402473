"""All ranks together: which nodes of which ranks are one communication, and what is wrong if they do not fit.

The ranks are played side by side. Starting communication never blocks; `dist.wait` blocks until every rank that takes part
has started its share. Collectives of a group are matched in the order in which each rank starts them, messages in the order
of their (sender, receiver, tag). To make a group is to meet its other members: torch counts the groups that a rank makes, names
each by its number, and the members find each other by that name. When no rank can go on, the ranks that wait are the fault.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from graphguard.graph.agreement import ONE_ORDER, called, disagreement, form, inconsistency, other_members, pairwise
from graphguard.graph.collectives import MESSAGES, NEW_GROUP, WAIT
from graphguard.graph.findings import Finding
from graphguard.graph.ir import Graph, Node, Source


@dataclass
class Match:
    """One communication: a node of each rank of the group (of a message: sender first, then receiver)."""

    id: int
    op: str
    group: tuple[int, ...]
    nodes: dict[int, Node] = field(default_factory=dict)

    @property
    def any_node(self) -> Node:
        return self.nodes[self.group[0]]

    @property
    def complete(self) -> bool:
        return len(self.nodes) == len(self.group)


@dataclass
class Joint:
    """The graphs of all ranks, and how their communication fits together. With findings, `matches` may be incomplete."""

    graphs: Sequence[Graph]
    matches: list[Match]
    findings: list[Finding]
    _by_node: dict[Node, Match] = field(default_factory=dict)

    def match_of(self, rank: int, node: Node) -> Match:
        return self._by_node[node]

    def matched(self, node: Node) -> Match | None:
        """The communication that a node takes part in; None for one that the ranks do not come to."""
        return self._by_node.get(node)

    def returning(self, path: str) -> list[bool]:
        """By rank, whether it returns an output."""
        return [graph.outputs.get(path) is not None for graph in self.graphs]


def join(graphs: Sequence[Graph]) -> Joint:
    """Match the communication of all ranks. What does not fit becomes findings, the first fault first."""
    return _Play(graphs).run()


def first_mismatch(graphs: Sequence[Graph], raised: Collection[int]) -> Finding | None:
    """The first call that does not fit, of ranks some of which raise at their end: what is missing after that means nothing.
    If no rank comes so far that it could raise, it is what they wait for."""
    play = _Play(graphs)
    try:
        play.play()
    except Mismatch as stop:
        return stop.finding
    comes_so_far = not raised or any(play.ranks[rank].done for rank in raised)
    return None if comes_so_far else next(play.stuck(), None)


class Mismatch(Exception):
    """A fault after which the order of events means nothing."""

    def __init__(self, finding: Finding):
        super().__init__(finding.message)
        self.finding = finding


def disagree(rank: int, node: Node, other: int, its: Node, problem: tuple[str, str]) -> Mismatch:
    kind, text = problem
    message = f"rank {rank} at {node.source} and rank {other} at {its.source} disagree: {text}"
    return Mismatch(Finding(kind, message, (rank, other), _sources(node, its)))


def not_in_itself(rank: int, node: Node, problem: str) -> Mismatch:
    message = f"rank {rank} calls {node.op} at {node.source}: {problem}"
    return Mismatch(Finding("collective-mismatch", message, (rank,), _sources(node)))


def to_itself(rank: int, node: Node) -> Mismatch:
    verb = "sends to" if node.op == "dist.send" else "receives from"
    message = f"rank {rank} {verb} itself at {node.source}: a message needs two ranks"
    return Mismatch(Finding("unmatched-message", message, (rank,), _sources(node)))


class _Rank:
    """How far one rank has come."""

    def __init__(self, graph: Graph):
        self.nodes = [node for node in graph.nodes if node.communicates]
        self.position = 0
        self.open: dict[object, list[Match]] = defaultdict(list)

    @property
    def done(self) -> bool:
        return self.position == len(self.nodes)

    @property
    def current(self) -> Node:
        return self.nodes[self.position]

    def waits_for(self) -> Match | None:
        """The first unfinished communication that the current wait needs."""
        if self.done or self.current.op != WAIT:
            return None
        return next((match for match in self.open[self.current.kwargs["work"]] if not match.complete), None)


class _Play:
    def __init__(self, graphs: Sequence[Graph]):
        self.graphs = graphs
        self.ranks = [_Rank(graph) for graph in graphs]
        self.matches: list[Match] = []
        self.by_node: dict[Node, Match] = {}
        self.groups: dict[tuple[int, ...], int] = {}
        self.names: dict[object, tuple[int, Node]] = {}  # of the groups that are made, with who came first
        self.started: dict[object, int] = defaultdict(int)
        self.collectives: dict[object, Match] = {}
        self.messages: dict[object, deque[Match]] = defaultdict(deque)
        self.seen: dict[int, dict[Hashable, int]] = defaultdict(dict)  # of each match, the first rank with a form of its call

    def run(self) -> Joint:
        findings = [finding for graph in self.graphs for finding in graph.findings]
        try:
            self.play()
            findings += list(self.stuck()) or list(self._left_over())
        except Mismatch as stop:
            findings.append(stop.finding)
        return Joint(self.graphs, self.matches, findings, self.by_node)

    def play(self) -> None:
        """All ranks, as far as they come."""
        while sum(self._advance(rank) for rank in range(len(self.ranks))) > 0:
            pass

    def _advance(self, rank: int) -> bool:
        """Play one rank until it has to wait."""
        state, moved = self.ranks[rank], False
        while not state.done and state.waits_for() is None:
            if state.current.op != WAIT and not _of_others(rank, state.current):
                match = self._start(rank, state.current)
                self.by_node[state.current] = match
                state.open[state.current.kwargs["work"]].append(match)
            state.position += 1
            moved = True
        return moved

    def _start(self, rank: int, node: Node) -> Match:
        group: tuple[int, ...] = node.kwargs["group"]  # type: ignore[assignment]
        problem = None if node.op == NEW_GROUP else inconsistency(group, rank, node)
        if problem is not None:
            raise not_in_itself(rank, node, problem)
        match = self._message(rank, node) if node.op in MESSAGES else self._collective(rank, node)
        match.nodes[rank] = node
        self._require_agreement(match, rank)
        return match

    def _collective(self, rank: int, node: Node) -> Match:
        group: tuple[int, ...] = node.kwargs["group"]  # type: ignore[assignment]
        key = self._name(rank, node) if node.op == NEW_GROUP else self._turn(rank, node)
        if key not in self.collectives:
            self.collectives[key] = self._new_match(node.op, group)
        return self.collectives[key]

    def _name(self, rank: int, node: Node) -> Hashable:
        """Members look for each other by the name of their group. A rank that is alone in it looks for nobody, but leaves its
        address under that name: only others who are alone do not mind."""
        group, name = node.kwargs["group"], node.kwargs["name"]
        other, its = self.names.setdefault(name, (rank, node))
        if group != its.kwargs["group"] and not (group == (rank,) and its.kwargs["group"] == (other,)):
            raise disagree(other, its, rank, node, ("collective-mismatch", other_members(its, node)))
        return (name, rank) if group == (rank,) else name

    def _turn(self, rank: int, node: Node) -> Hashable:
        """The collectives of a group are told apart by their number."""
        group: tuple[int, ...] = node.kwargs["group"]  # type: ignore[assignment]
        number = self.groups.setdefault(group, len(self.groups))  # which is quick to compare: a group may have very many ranks
        channel = (number, node.kwargs.get("channel", 0))
        self.started[channel, rank] += 1
        return channel, self.started[channel, rank]

    def _message(self, rank: int, node: Node) -> Match:
        peer: int = node.kwargs["peer"]  # type: ignore[assignment]
        if peer == rank:
            raise to_itself(rank, node)
        ends = (rank, peer) if node.op == "dist.send" else (peer, rank)
        key = (ends, node.kwargs["tag"], node.kwargs["group"], node.kwargs.get("channel", 0))
        waiting = self.messages[key]
        if waiting and rank not in waiting[0].nodes:
            return waiting.popleft()
        waiting.append(self._new_match("dist.send", ends))
        return waiting[-1]

    def _new_match(self, op: str, group: tuple[int, ...]) -> Match:
        match = Match(len(self.matches), op, group)
        self.matches.append(match)
        return match

    def _require_agreement(self, match: Match, newcomer: int) -> None:
        other = match.nodes[newcomer]
        for rank, node in self._compared(match, newcomer):
            problem = disagreement(match.group, rank, node, newcomer, other)
            if problem is not None:
                raise disagree(rank, node, newcomer, other, problem)

    def _compared(self, match: Match, newcomer: int) -> list[tuple[int, Node]]:
        """The members that a newcomer may disagree with. Of those that show the same to all, the first is enough, if the
        newcomer does so too."""
        node = match.nodes[newcomer]
        if not pairwise(node):
            first = next(iter(match.nodes.items()))
            return [] if first[0] == newcomer else [first]
        shown, seen = form(node), self.seen[match.id]
        known = list(match.nodes if shown is None else seen.values())
        seen.setdefault(("of its own", newcomer) if shown is None else shown, newcomer)
        return [(rank, match.nodes[rank]) for rank in known if rank != newcomer]

    # ------------------------------------------------------------------ what is left when nothing moves
    def stuck(self) -> Iterator[Finding]:
        waiting = {rank: match for rank, state in enumerate(self.ranks) if (match := state.waits_for()) is not None}
        if not waiting:
            return
        absent = {rank: [r for r in match.group if r not in match.nodes] for rank, match in waiting.items()}
        finished = [(rank, r) for rank, missing in absent.items() for r in missing if self._never_comes(waiting[rank], rank, r)]
        if finished:
            yield never_joined(waiting[finished[0][0]], *finished[0])
            return
        yield deadlock({rank: waiting[rank] for rank in _cycle(absent)})

    def _never_comes(self, match: Match, present: int, missing: int) -> bool:
        """Whether a rank that is waited for has ended, or has no counterpart of the message in what it has yet to do."""
        state, mine = self.ranks[missing], match.nodes[present]
        if state.done or mine.op not in (*MESSAGES, NEW_GROUP):
            return state.done
        if mine.op == NEW_GROUP:
            return not any(_same_group(node, mine) for node in state.nodes[state.position :])
        same = ("tag", "group", "channel")
        return not any(
            node.op in MESSAGES and node.op != mine.op and node.kwargs["peer"] == present
            and all(node.kwargs.get(key) == mine.kwargs.get(key) for key in same)
            for node in state.nodes[state.position :]
        )  # fmt: skip

    def _left_over(self) -> Iterator[Finding]:
        for match in self.matches:
            if not match.complete:
                present = next(iter(match.nodes))
                missing = next(rank for rank in match.group if rank not in match.nodes)
                yield never_joined(match, present, missing)


def deadlock(waiting: dict[int, Match]) -> Finding:
    """Ranks that wait for each other, with what each of them waits for."""
    nodes = [match.nodes[rank] for rank, match in waiting.items()]
    lines = [f"rank {rank} waits in {called(node)} at {node.source}" for rank, node in zip(waiting, nodes, strict=True)]
    return Finding("deadlock", "ranks wait for each other: " + "; ".join(lines), tuple(waiting), _sources(*nodes))


def never_joined(match: Match, present: int, missing: int) -> Finding:
    node = match.nodes[present]
    if node.op in MESSAGES:
        sends = node.op == "dist.send"
        message = (
            f"rank {present} {'sends to' if sends else 'receives from'} rank {missing} at {node.source}, "
            f"but rank {missing} never {'receives' if sends else 'sends'} it"
        )
        return Finding("unmatched-message", message, (present, missing), _sources(node))
    if node.op == NEW_GROUP:
        message = (
            f"rank {present} makes the group of ranks {list(match.group)} at {node.source}, where rank {missing} does not: "
            f"{'members must be in equally many groups by then' if _is_local(node) else ONE_ORDER}"
        )
        return Finding("collective-mismatch", message, (present, missing), _sources(node))
    message = f"rank {present} calls {called(node)} at {node.source}, but rank {missing} of its group never does"
    return Finding("collective-mismatch", message, (present, missing), _sources(node))


def made_by_some(graphs: Sequence[Graph]) -> str | None:
    """In words, whether ranks leave out or change groups that they are not in. Gloo does not mind if no other group follows."""
    made = [[node for node in graph.nodes if node.op == NEW_GROUP and not _is_local(node)] for graph in graphs]
    most = max(made, key=len, default=[])
    for rank, its in enumerate(made):
        for number, node in enumerate(most):
            if number >= len(its) or its[number].kwargs["group"] != node.kwargs["group"]:
                group = list(node.kwargs["group"])  # type: ignore[arg-type]
                return (f"rank {rank} does not make the group of ranks {group}, as others do at {node.source}: the backend "
                        "lets it leave out groups that it is not in (gloo does, NCCL on bound devices does not)")  # fmt: skip
    return None


def _is_local(node: Node) -> bool:
    """Whether only the members make the group: it is then named by its ranks, not by a number."""
    return not str(node.kwargs["name"]).isdigit()


def _of_others(rank: int, node: Node) -> bool:
    """Whether a rank makes a group that it is not in: it counts it, and goes on."""
    group: tuple[int, ...] = node.kwargs["group"]  # type: ignore[assignment]
    return node.op == NEW_GROUP and rank not in group


def _same_group(node: Node, other: Node) -> bool:
    return node.op == NEW_GROUP and all(node.kwargs[key] == other.kwargs[key] for key in ("name", "group"))


def _cycle(absent: dict[int, list[int]]) -> list[int]:
    """Ranks that wait for each other, following for each the first rank that it waits for."""
    path = [next(iter(absent))]
    while (following := absent[path[-1]][0]) not in path:
        path.append(following)
    return path[path.index(following) :]


def _sources(*nodes: Node) -> tuple[Source, ...]:
    return tuple(node.source for node in nodes if node.source is not None)
