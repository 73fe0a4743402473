"""The part of both programs that some outputs are made from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from graphguard.graph.ancestry import needed_alone, needed_of_ranks
from graphguard.graph.ir import Graph, Node, Value
from graphguard.graph.matching import Joint


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
    relations = [sliced_alone(relation, rank.inputs) for relation, rank in zip(relations, ranks, strict=True)]
    alone = sliced_alone(sequential, paths)
    read = {name for relation in relations for name in relation.inputs}
    inputs = {name: value for name, value in sequential.inputs.items() if name in alone.inputs or name in read}
    return Programs(replace(alone, inputs=inputs), replace(joint, graphs=ranks), relations)


def _chosen(graph: Graph, paths: Iterable[str]) -> dict[str, Value | None]:
    return {path: graph.outputs[path] for path in paths if path in graph.outputs}


def sliced_alone(graph: Graph, paths: Iterable[str]) -> Graph:
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
