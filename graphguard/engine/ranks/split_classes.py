"""Classes of ranks that cannot be described at once, and how to part them.

Ranks of one class are described at once. In a pipeline, though, a rank may receive what a rank of its own class makes of what
that one received: all at once, neither could begin. Such classes are parted by the classes that their ranks hear from. And
the groups in which the ranks of a class meet at one operation must be apart and of one size: those that overlap are parted.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from graphguard.engine.ranks.rank_classes import Stream
from graphguard.graph.collectives import COLLECTIVES, MESSAGES, WAIT, Count
from graphguard.graph.ir import Node, Value
from graphguard.graph.matching import Joint, Match


def without_overlaps(streams: Sequence[Stream], joint: Joint) -> list[Stream]:
    """Classes that can be described one operation after another."""
    found = [part for stream in streams for part in _of_groups_apart(stream, joint)]
    while stuck := _Run(found, joint).stuck():
        parted = [part for stream in found for part in (_parted(stream, found, joint) if stream in stuck else [stream])]
        if len(parted) == len(found):  # not by whom they hear: each on its own
            parted = [part for stream in found for part in (_alone(stream) if stream in stuck else [stream])]
            if len(parted) == len(found):
                return found
        found = parted
    return found


def _of_groups_apart(stream: Stream, joint: Joint) -> list[Stream]:
    """The class in parts whose groups, at every operation, share no rank and have one size."""
    done, left = [], [stream]
    while left:
        each = left.pop()
        parts = _first_overlap(each, joint)
        if len(parts) == 1:
            done.append(each)
        else:
            left += reversed(parts)
    return done


def _first_overlap(stream: Stream, joint: Joint) -> list[Stream]:
    """The class parted at the first operation where its groups overlap; all of it if there is none."""
    for position, node in enumerate(stream.graphs[0].nodes):
        if stream.lanes == 1 or not _meets(node) or not _is_of_groups(node):
            continue
        matches = [joint.match_of(rank, graph.nodes[position]) for rank, graph in zip(stream.ranks, stream.graphs, strict=True)]
        parts = _apart(matches)
        if len(parts) > 1:
            return [_of_lanes(stream, lanes) for lanes in parts]
    return [stream]


def _apart(matches: Sequence[Match]) -> list[list[int]]:
    """The lanes in parts: those of one communication together, those of communications that share a rank in different ones."""
    distinct = list({match.id: match for match in matches}.values())
    sizes = {len(match.group) for match in distinct}
    if len(distinct) == 1 or (len(sizes) == 1 and len(set().union(*(m.group for m in distinct))) == len(distinct) * max(sizes)):
        return [list(range(len(matches)))]
    taken: list[tuple[int, set[int]]] = []  # of each part, the size of its groups and their ranks
    part_of: dict[int, int] = {}
    for match in distinct:
        size = len(match.group)
        fits = (n for n, (its, ranks) in enumerate(taken) if its == size and ranks.isdisjoint(match.group))
        part_of[match.id] = number = next(fits, len(taken))
        if number == len(taken):
            taken.append((size, set()))
        taken[number][1].update(match.group)
    parts: list[list[int]] = [[] for _ in taken]
    for lane, match in enumerate(matches):
        parts[part_of[match.id]].append(lane)
    return parts


def _parted(stream: Stream, streams: Sequence[Stream], joint: Joint) -> list[Stream]:
    class_of = {rank: number for number, each in enumerate(streams) for rank in each.ranks}
    parts: dict[Hashable, list[int]] = {}
    for lane, (rank, graph) in enumerate(zip(stream.ranks, stream.graphs, strict=True)):
        heard = [
            tuple(class_of[other] for other in _senders(joint.match_of(rank, node)) if other != rank)
            for node in graph.nodes
            if _meets(node)
        ]
        parts.setdefault(tuple(heard), []).append(lane)
    return [_of_lanes(stream, lanes) for lanes in parts.values()]


def _alone(stream: Stream) -> list[Stream]:
    return [_of_lanes(stream, [lane]) for lane in range(stream.lanes)]


def _of_lanes(stream: Stream, lanes: Sequence[int]) -> Stream:
    return Stream(*([row[lane] for lane in lanes] for row in (stream.ranks, stream.graphs, stream.relations)))  # type: ignore[arg-type]


def _meets(node: Node) -> bool:
    return node.communicates and node.op != WAIT


def _is_of_groups(node: Node) -> bool:
    """Whether what a rank gets depends on who is in its group."""
    row = COLLECTIVES[node.op]
    return not row.is_message and (row.reads, row.fills) != (Count.NONE, Count.NONE)


def _senders(match: Match) -> Sequence[int]:
    return match.group[:1] if match.op in MESSAGES else match.group


class _Run:
    """The order in which operations can be described, without describing them."""

    def __init__(self, streams: Sequence[Stream], joint: Joint):
        self.streams, self.joint = streams, joint
        self.posted: set[Node] = set()  # communications, of every rank, whose operands are there
        self.known: list[set[Value]] = [{*s.graphs[0].inputs.values(), *s.graphs[0].constants} for s in streams]
        self.pending = [list(range(len(stream.graphs[0].nodes))) for stream in streams]

    def stuck(self) -> list[Stream]:
        """The classes that do not come to their end."""
        while any(self._advance(number) for number in range(len(self.streams))):
            pass
        return [stream for stream, left in zip(self.streams, self.pending, strict=True) if left]

    def _advance(self, number: int) -> bool:
        stream, known, waiting = self.streams[number], self.known[number], []
        moved = False
        for position in self.pending[number]:
            node = stream.graphs[0].nodes[position]
            ready = all(value in known for value in node.operands())
            if ready and _meets(node):
                nodes = [graph.nodes[position] for graph in stream.graphs]
                if nodes[0] not in self.posted:
                    self.posted.update(nodes)
                    moved = True
                matches = {id(match): match for match in map(self.joint.match_of, stream.ranks, nodes)}
                ready = all(self._arrived(match) for match in matches.values())
            if ready:
                known.update(node.outputs)
                moved = True
            else:
                waiting.append(position)
        self.pending[number] = waiting
        return moved

    def _arrived(self, match: Match) -> bool:
        return all(match.nodes[rank] in self.posted for rank in _senders(match))
