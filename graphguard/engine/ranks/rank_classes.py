"""Which ranks can be described at once: those whose programs differ in numbers alone, and only where a number may differ."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphguard.engine.terms.lane import Lane, collapse
from graphguard.graph.ir import Arg, Graph, Node, Value
from graphguard.graph.operators import VARYING, name_of

_OWN = {"group", "channel", "peer", "work", "tag", "root"}  # what only the matching of ranks looks at


@dataclass
class Stream:
    """Ranks of one class. `graphs` and `relations` are theirs, in order; the first stands for all."""

    ranks: list[int]
    graphs: list[Graph]
    relations: list[Graph]

    @property
    def lanes(self) -> int:
        return len(self.ranks)

    def arguments(self, part: str, position: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a node, with one number per lane where the ranks differ."""
        graphs = self.graphs if part == "graphs" else self.relations
        node = graphs[0].nodes[position]
        places = [p for p in varying(node.op) if p < len(node.args)]
        kwargs = {name: arg for name, arg in node.kwargs.items() if name not in _OWN}
        if not places or len(graphs) == 1:
            return node.args, kwargs
        args: list[Any] = list(node.args)
        for place in places:
            if _is_number(args[place]):
                numbers: Lane = np.array([graph.nodes[position].args[place] for graph in graphs], dtype=np.int64)
                args[place] = collapse(numbers)
        return tuple(args), kwargs


def streams(graphs: Sequence[Graph], relations: Sequence[Graph], apart: bool = False) -> list[Stream]:
    """The ranks by class, in the order of their first ranks; or each by itself."""
    found: dict[Hashable, Stream] = {}
    for rank, (graph, relation) in enumerate(zip(graphs, relations, strict=True)):
        signature = rank if apart else (_signature(graph), _signature(relation))
        stream = found.setdefault(signature, Stream([], [], []))
        stream.ranks.append(rank)
        stream.graphs.append(graph)
        stream.relations.append(relation)
    return list(found.values())


def _signature(graph: Graph) -> Hashable:
    numbers = {value: number for number, value in enumerate(graph.values())}
    constants = tuple((v.shape, v.dtype) if v.numel == 1 else (v.shape, v.dtype, c.data) for v, c in graph.constants.items())
    nodes = tuple(_node(node, numbers) for node in graph.nodes)
    inputs = tuple((name, v.shape, v.dtype) for name, v in graph.inputs.items())
    outputs = tuple((path, None if v is None else numbers[v]) for path, v in graph.outputs.items())
    return inputs, constants, nodes, outputs


def _node(node: Node, numbers: Mapping[Value, int]) -> Hashable:
    free = varying(node.op)
    args = tuple("#" if p in free and _is_number(arg) else _arg(arg, numbers) for p, arg in enumerate(node.args))
    kwargs = tuple((name, _arg(arg, numbers)) for name, arg in node.kwargs.items() if name not in _OWN)
    outputs = tuple((numbers[v], v.shape, v.dtype) for v in node.outputs)
    return node.op, args, kwargs, outputs


def varying(operator: str) -> tuple[int, ...]:
    """The arguments in which ranks of one class may have different whole numbers."""
    return (2,) if operator == "gg.part" else VARYING.get(name_of(operator), ())


def _is_number(arg: object) -> bool:
    return type(arg) is int


def _arg(arg: Arg, numbers: Mapping[Value, int]) -> Hashable:
    if type(arg) is Value:
        return ("%", numbers[arg])
    if type(arg) is tuple:
        return tuple(_arg(each, numbers) for each in arg)
    return (type(arg).__name__, arg) if isinstance(arg, (bool, int, float)) else arg  # 1, 1.0 and True are different
