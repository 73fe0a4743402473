"""Which lines tell of a change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphguard.graph.ir import Graph, Node
from graphguard.graph.lines import OwnLines, helpers_of

Place = tuple[str, int]


class Places:
    """A change is made where an operation is run once. In a function that the sequential program runs as well, or that several
    lines of the ranks call, only that one call is wrong, and the line that makes it tells of the change, too."""

    def __init__(self, sequential: Graph, ranks: Sequence[Graph]):
        self.shared, self.helpers = OwnLines(sequential).shared, helpers_of(ranks)

    def of(self, node: Node) -> Iterator[Place]:
        for line in node.source.outwards() if node.source is not None else ():
            yield line.place
            if line.place not in self.shared and (line.file, line.function) not in self.helpers:
                return
