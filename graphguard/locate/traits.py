"""What is known of the lines of the ranks themselves, whatever was seen there: their kind, and which outputs come of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

from graphguard.graph.ir import Graph, Node, Source, Value
from graphguard.graph.lines import OwnLines, helpers_of
from graphguard.graph.matching import Joint

At = tuple[int, Value]


class Traits:
    def __init__(self, sequential: Graph, joint: Joint):
        self.joint = joint
        self.shared = OwnLines(sequential).shared
        self.helpers = helpers_of(joint.graphs)
        nodes = [(node, node.source) for graph in joint.graphs for node in graph.nodes if node.source is not None]
        self.communicates = {source.place for node, source in nodes if node.communicates}
        self.backward = {source.place for node, source in nodes if node.backward and source.function == "backward"}
        self.files = {list(source.outwards())[-1].file for source in {source for _, source in nodes}}

    def of(self, line: Source) -> Iterator[str]:
        """Rows of the table of `ranking.py` that are true of a line."""
        if line.place in self.shared:
            yield "the sequential program runs it, too"
        if (line.file, line.function) in self.helpers:
            yield "in a function that several lines call"
        if line.place in self.communicates:
            yield "it communicates"
        if line.place in self.backward:
            yield "in a backward that was written"
        if line.file not in self.files:
            yield "in another file than the program"

    # ------------------------------------------------------------------ what comes of a line
    def outputs_of(self, line: Source) -> frozenset[str]:
        """The outputs that come of what is done on a line, or of what it calls for."""
        reached: set[At] = set()
        sources = {node.source for graph in self.joint.graphs for node in graph.nodes if node.source is not None}
        leading = {source for source in sources if any(each.place == line.place for each in source.outwards())}
        pending = [
            (rank, value)
            for rank, graph in enumerate(self.joint.graphs)
            for node in graph.nodes
            if node.source in leading
            for value in node.outputs
        ]
        while pending:
            at = pending.pop()
            if at not in reached:
                reached.add(at)
                pending += [made for rank, node in self._users[at] for made in self._results(rank, node)]
        ends = [(path, (rank, value)) for rank, graph in enumerate(self.joint.graphs) for path, value in graph.outputs.items()]
        return frozenset(path for path, at in ends if at in reached)

    @cached_property
    def _users(self) -> dict[At, list[tuple[int, Node]]]:
        users: dict[At, list[tuple[int, Node]]] = defaultdict(list)
        for rank, graph in enumerate(self.joint.graphs):
            for node in graph.nodes:
                for value in node.operands():
                    users[rank, value].append((rank, node))
        return users

    def _results(self, rank: int, node: Node) -> list[At]:
        if not node.communicates or node.op == "dist.wait":
            return [(rank, value) for value in node.outputs]
        return [(other, value) for other, each in self.joint.match_of(rank, node).nodes.items() for value in each.outputs]
