"""What some values are made from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from graphguard.graph.ir import Graph, Node, Value
from graphguard.graph.matching import Joint
from graphguard.graph.world import Place, World


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


def needed_of_classes(world: World, wanted: Iterable[tuple[int, Value]]) -> set[Place]:
    """All operations, of all classes of ranks, that some values of classes are made from."""
    makers = [
        {value: position for position, node in enumerate(each.graph.nodes) for value in node.outputs} for each in world.classes
    ]
    places: set[Place] = set()
    pending = list(wanted)
    while pending:
        number, value = pending.pop()
        position = makers[number].get(value)
        if position is None or (number, position) in places:
            continue
        for place in world.together((number, position)):
            if place not in places:
                places.add(place)
                pending += [(place[0], operand) for operand in world.node(place).operands()]
    return places


def outputs_by_node(sequential: Graph, world: World) -> dict[Node, frozenset[str]]:
    """By operation of both programs, the outputs that are made from its results, on whichever rank."""
    graphs = (sequential, *(each.graph for each in world.classes))
    paths = list(dict.fromkeys(path for graph in graphs for path in graph.outputs))
    bit_of = {path: 1 << place for place, path in enumerate(paths)}
    reached: dict[Value, int] = defaultdict(int)  # a bit for each output
    for graph in graphs:
        for path, value in graph.outputs.items():
            if value is not None:
                reached[value] |= bit_of[path]
    met = {world.node(place): [world.node(each) for each in world.together(place)] for place in world.calls}
    found: dict[Node, int] = {}
    changed = True
    while changed:  # what one rank sends may reach what another returns
        changed = False
        for graph in graphs:
            for node in reversed(graph.nodes):
                bits = 0
                for member in met.get(node, (node,)):
                    for value in member.outputs:
                        bits |= reached[value]
                if bits != found.get(node):
                    found[node], changed = bits, True
                    for value in node.operands():
                        reached[value] |= bits
    told = {bits: frozenset(path for path, bit in bit_of.items() if bits & bit) for bits in set(found.values())}
    return {node: told[bits] for node, bits in found.items()}
