"""Drops what nothing needs: dead operations, and those that only built a module."""

from __future__ import annotations

from graphguard.ir import Graph, Value

CONSTRUCTION = "communication while the module was built, whose parameters are inputs since, is not part of the graph"


def prune(graph: Graph, constructed: int = 0) -> None:
    """Keep what the outputs and the communication need. Of the first `constructed` nodes, which built a module whose
    parameters are inputs since, communication is kept only where its result is still used; that is an assumption."""
    needed: set[Value] = {value for value in graph.outputs.values() if value is not None}
    kept = []
    for index in reversed(range(len(graph.nodes))):
        node = graph.nodes[index]
        if (node.communicates and index >= constructed) or any(output in needed for output in node.outputs):
            needed.update(node.operands())
            kept.append(node)
        elif node.communicates and CONSTRUCTION not in graph.assumptions:
            graph.assumptions = tuple(sorted((*graph.assumptions, CONSTRUCTION)))
    graph.nodes = kept[::-1]
    graph.constants = {value: constant for value, constant in graph.constants.items() if value in needed}
