"""Which lines are the ranks' own. A helper that both programs call is not where they part: the line that calls it is."""

from __future__ import annotations

from collections.abc import Iterable

from graphguard.graph.ir import Graph, Node, Source


class OwnLines:
    def __init__(self, sequential: Graph):
        sources = {node.source for node in sequential.nodes if node.source is not None}
        self.shared = frozenset(each.place for source in sources for each in source.outwards())

    def of(self, source: Source | None) -> Source | None:
        """The nearest line that leads to an operation and that the sequential program does not run; else the line itself."""
        if source is None:
            return None
        own = next((each for each in source.outwards() if each.place not in self.shared), source)
        return own.inside(source.module)  # which says more than that of a caller

    def at(self, node: Node) -> Source | None:
        """Where an operation of the ranks is named: at their own line; a gradient, at the line whose gradient it is."""
        return node.source if node.backward else self.of(node.source)


def turn_of(node: Node, nodes: Iterable[Node]) -> tuple[int, int] | None:
    """The how manieth of how many alike it is: the same operator at one line of one module; None if it is the only one."""
    kind = (node.op, node.source, node.module, node.backward)
    alike = [each for each in nodes if (each.op, each.source, each.module, each.backward) == kind]
    place = next((place for place, each in enumerate(alike, 1) if each is node), 0)
    return (place, len(alike)) if place and len(alike) > 1 else None


def helpers_of(graphs: Iterable[Graph]) -> frozenset[tuple[str, str]]:
    """Functions that are called from several lines, as file and name: a line in one says little without its caller."""
    callers: dict[tuple[str, str], set[tuple[str, int]]] = {}
    for source in {node.source for graph in graphs for node in graph.nodes if node.source is not None}:
        for each in source.outwards():
            if each.caller is not None:
                callers.setdefault((each.file, each.function), set()).add(each.caller.place)
    return frozenset(function for function, places in callers.items() if len(places) > 1)
