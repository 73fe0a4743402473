"""What some values are made from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from graphguard.ir import Graph, Node, Value
from graphguard.joint import Joint


def needed_alone(graph: Graph, wanted: Iterable[Value]) -> set[Value]:
    """All values that some values of a graph without communication are made from."""
    needed = set(wanted)
    for node in reversed(graph.nodes):
        if any(value in needed for value in node.outputs):
            needed.update(node.operands())
    return needed


def needed_of_ranks(joint: Joint, wanted: Iterable[tuple[int, Value]]) -> tuple[set[Node], set[Value]]:
    """All operations and values, of all ranks, that some values of ranks are made from."""
    makers = [{value: node for node in graph.nodes for value in node.outputs} for graph in joint.graphs]
    nodes: set[Node] = set()
    needed: set[Value] = set()
    pending = list(wanted)
    while pending:
        rank, value = pending.pop()
        if value in needed:
            continue
        needed.add(value)
        node = makers[rank].get(value)
        if node is None or node in nodes:
            continue
        for other, member in _members(joint, rank, node):
            nodes.add(member)
            pending += [(other, operand) for operand in member.operands()]
    return nodes, needed


def _members(joint: Joint, rank: int, node: Node) -> Iterator[tuple[int, Node]]:
    """The node, and those of other ranks that communicate with it."""
    yield from joint.match_of(rank, node).nodes.items() if node.communicates else [(rank, node)]
