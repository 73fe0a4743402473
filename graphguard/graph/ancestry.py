"""What some values are made from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from graphguard.graph.ir import Graph, Node, Value
from graphguard.graph.matching import Joint


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


def outputs_by_node(sequential: Graph, joint: Joint) -> dict[Node, frozenset[str]]:
    """By operation of both programs, the outputs that are made from its results, on whichever rank."""
    graphs = (sequential, *joint.graphs)
    paths = list(dict.fromkeys(path for graph in graphs for path in graph.outputs))
    reached: dict[Value, int] = defaultdict(int)  # a bit for each output
    for graph in graphs:
        for path, value in graph.outputs.items():
            if value is not None:
                reached[value] |= 1 << paths.index(path)
    members = {node: tuple(match.nodes.values()) for match in joint.matches for node in match.nodes.values()}
    found: dict[Node, int] = {}
    changed = True
    while changed:  # what one rank sends may reach what another returns
        changed = False
        for graph in graphs:
            for node in reversed(graph.nodes):
                bits = 0
                for member in members.get(node, (node,)):
                    for value in member.outputs:
                        bits |= reached[value]
                if bits != found.get(node):
                    found[node], changed = bits, True
                    for value in node.operands():
                        reached[value] |= bits
    told = {bits: frozenset(path for place, path in enumerate(paths) if bits >> place & 1) for bits in set(found.values())}
    return {node: told[bits] for node, bits in found.items()}
