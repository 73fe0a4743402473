"""Drops what nothing needs: dead operations, and, once the ranks are matched, what only made groups or built a module."""

from __future__ import annotations

from graphguard.graph.collectives import NEW_GROUP, WAIT
from graphguard.graph.ir import Graph, Node, Value
from graphguard.graph.matching import Joint
from graphguard.graph.world import Meeting, Messages, Place, World

CONSTRUCTION = "communication while the module was built, whose parameters are inputs since, is matched, but not in the graph"


def prune(graph: Graph) -> None:
    """Keep what the outputs and the communication need."""
    needed: set[Value] = {value for value in graph.outputs.values() if value is not None}
    kept, left = [], 0
    for index in reversed(range(len(graph.nodes))):
        node = graph.nodes[index]
        if node.communicates or any(output in needed for output in node.outputs):
            needed.update(node.operands())
            kept.append(node)
            left += index < graph.built
    graph.built = left
    _keep(graph, kept[::-1], needed)


def settled(joint: Joint) -> Joint:
    """Matched ranks without the making of groups, and without the communication that only built a module, whose parameters
    are inputs since: what is needed neither after that nor by any rank's outputs. That is an assumption."""
    if not any(graph.built or any(node.op == NEW_GROUP for node in graph.nodes) for graph in joint.graphs):
        return joint
    wanted = {
        joint.match_of(rank, node).id
        for rank, graph in enumerate(joint.graphs)
        for node in graph.nodes[graph.built :]
        if _is_exchange(node)
    }
    needed = [{value for value in graph.outputs.values() if value is not None} for graph in joint.graphs]
    before = -1
    while len(wanted) > before:  # what a rank needs of a communication, it needs of all its ranks
        before = len(wanted)
        kept = [_needed(joint, rank, wanted, needed[rank]) for rank in range(len(joint.graphs))]
    for rank, graph in enumerate(joint.graphs):
        if any(_is_exchange(node) and joint.match_of(rank, node).id not in wanted for node in graph.nodes):
            graph.assumptions = tuple(sorted({*graph.assumptions, CONSTRUCTION}))
        _keep(graph, kept[rank], needed[rank])
        graph.built = 0
    return Joint(joint.graphs, [match for match in joint.matches if match.id in wanted], joint.findings, joint._by_node)


def _needed(joint: Joint, rank: int, wanted: set[int], needed: set[Value]) -> list[Node]:
    """The nodes that a rank keeps. Adds to the communications that are wanted, and to the values that are needed."""
    kept, works = [], set()
    for node in reversed(joint.graphs[rank].nodes):
        if node.op == WAIT:
            kept.append(node)  # until it is known whether its work is kept
            continue
        its = joint.match_of(rank, node).id if _is_exchange(node) else None
        if its in wanted or any(output in needed for output in node.outputs):
            kept.append(node)
            needed.update(node.operands())
            if its is not None:
                wanted.add(its)
                works.add(node.kwargs["work"])
    return [node for node in reversed(kept) if node.op != WAIT or node.kwargs["work"] in works]


def settled_classes(world: World) -> World:
    """As `settled` does it of single ranks."""
    graphs = [each.graph for each in world.classes]
    if not any(graph.built or any(node.op == NEW_GROUP for node in graph.nodes) for graph in graphs):
        return world
    wanted = {
        other
        for number, graph in enumerate(graphs)
        for position in range(graph.built, len(graph.nodes))
        if (number, position) in world.calls
        for other in world.together((number, position))
    }
    needed = [{value for value in graph.outputs.values() if value is not None} for graph in graphs]
    before = -1
    while len(wanted) > before:
        before = len(wanted)
        kept = [_needed_by_class(world, number, wanted, needed[number]) for number in range(len(graphs))]
    place_of = {(number, old): (number, new) for number, its in enumerate(kept) for new, old in enumerate(its)}
    for number, graph in enumerate(graphs):
        if any(place[0] == number and place not in wanted for place in world.calls):
            graph.assumptions = tuple(sorted({*graph.assumptions, CONSTRUCTION}))
        _keep(graph, [graph.nodes[position] for position in kept[number]], needed[number])
        graph.built = 0
    moved: dict[int, Meeting | Messages] = {}
    for place in wanted:
        moved.setdefault(id(world.calls[place]), world.calls[place].moved(place_of))
    return World(world.mesh, world.classes, {place_of[place]: moved[id(world.calls[place])] for place in wanted})


def _needed_by_class(world: World, number: int, wanted: set[Place], needed: set[Value]) -> list[int]:
    """The positions of the nodes that a class keeps. Adds to the communications that are wanted, and to the values that are
    needed."""
    kept, works = [], set()
    nodes = world.classes[number].graph.nodes
    for position in reversed(range(len(nodes))):
        node = nodes[position]
        if node.op == WAIT:
            kept.append(position)  # until it is known whether its work is kept
        elif (number, position) in wanted or any(output in needed for output in node.outputs):
            kept.append(position)
            needed.update(node.operands())
            if (number, position) in world.calls:
                wanted.update(world.together((number, position)))
                works.add(node.kwargs["work"])
    return [place for place in reversed(kept) if nodes[place].op != WAIT or nodes[place].kwargs["work"] in works]


def _is_exchange(node: Node) -> bool:
    return node.communicates and node.op not in (WAIT, NEW_GROUP)


def _keep(graph: Graph, nodes: list[Node], needed: set[Value]) -> None:
    graph.nodes = nodes
    graph.constants = {value: constant for value, constant in graph.constants.items() if value in needed}
