"""The part of both programs that some outputs are made from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from graphguard.ir import Graph, Node, Value
from graphguard.joint import Joint


class Programs(NamedTuple):
    """The sequential program, the ranks, and how the ranks' inputs come from the sequential ones."""

    sequential: Graph
    joint: Joint
    relations: Sequence[Graph]

    @property
    def graphs(self) -> list[Graph]:
        return [self.sequential, *self.joint.graphs, *self.relations]


def sliced(programs: Programs, paths: Sequence[str]) -> Programs:
    """What some outputs need, of either program."""
    sequential, joint, relations = programs
    wanted = [(rank, graph.outputs.get(path)) for rank, graph in enumerate(joint.graphs) for path in paths]
    kept, needed = needed_of_ranks(joint, [(rank, value) for rank, value in wanted if value is not None])
    ranks = [_part(graph, [n for n in graph.nodes if n in kept], needed, _chosen(graph, paths)) for graph in joint.graphs]
    relations = [_alone(relation, rank.inputs) for relation, rank in zip(relations, ranks, strict=True)]
    alone = _alone(sequential, paths)
    read = {name for relation in relations for name in relation.inputs}
    inputs = {name: value for name, value in sequential.inputs.items() if name in alone.inputs or name in read}
    return Programs(replace(alone, inputs=inputs), replace(joint, graphs=ranks), relations)


def _chosen(graph: Graph, paths: Iterable[str]) -> dict[str, Value | None]:
    return {path: graph.outputs[path] for path in paths if path in graph.outputs}


def _alone(graph: Graph, paths: Iterable[str]) -> Graph:
    """Of a graph that does not communicate."""
    outputs = _chosen(graph, paths)
    needed = needed_alone(graph, [value for value in outputs.values() if value is not None])
    return _part(graph, [n for n in graph.nodes if any(value in needed for value in n.outputs)], needed, outputs)


def _part(graph: Graph, nodes: list[Node], needed: set[Value], outputs: dict[str, Value | None]) -> Graph:
    return replace(
        graph,
        inputs={name: value for name, value in graph.inputs.items() if value in needed},
        outputs=outputs,
        nodes=nodes,
        constants={value: constant for value, constant in graph.constants.items() if value in needed},
    )


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
