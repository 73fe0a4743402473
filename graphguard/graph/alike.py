"""Ranks put into classes: those whose programs differ in numbers alone, and only where a number may differ."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from graphguard.graph.collectives import NEW_GROUP
from graphguard.graph.ir import Arg, Constant, Graph, Node, Value
from graphguard.graph.operators import VARYING, name_of
from graphguard.graph.rank_class import Each, Groups, PerRank, RankClass

PEERS = ("channel", "peer", "tag", "root")  # numbers that only the matching of ranks looks at
NOT_OPERANDS = frozenset({"group", "work", *PEERS})


def classes_of(graphs: Sequence[Graph], relations: Sequence[Graph], apart: bool = False) -> list[RankClass]:
    """The ranks by class, in the order of their first ranks; or each by itself."""
    found: dict[Hashable, list[int]] = {}
    for rank, (graph, relation) in enumerate(zip(graphs, relations, strict=True)):
        form = rank if apart else (_form(graph), _form(relation))
        found.setdefault(form, []).append(rank)
    return [
        RankClass(np.array(ranks, dtype=np.int64), *(_together([each[r] for r in ranks]) for each in (relations, graphs)))
        for ranks in found.values()
    ]


def varying(operator: str) -> tuple[int, ...]:
    """The arguments in which ranks of one class may have different whole numbers."""
    return (2,) if operator == "gg.part" else VARYING.get(name_of(operator), ())


# ---------------------------------------------------------------------- what ranks of one class have in common
def _form(graph: Graph) -> Hashable:
    numbers = {value: number for number, value in enumerate(graph.values())}
    works: dict[Arg, int] = {}
    constants = tuple((v.shape, v.dtype) if _is_number(c) else (v.shape, v.dtype, c.data) for v, c in graph.constants.items())
    nodes = tuple(_node_form(node, numbers, works) for node in graph.nodes)
    inputs = tuple((name, v.shape, v.dtype) for name, v in graph.inputs.items())
    outputs = tuple((path, None if v is None else numbers[v]) for path, v in graph.outputs.items())
    drawn = tuple(numbers.get(value) for value in graph.states)
    return inputs, constants, nodes, outputs, drawn


def _is_number(constant: Constant) -> bool:
    """Whether a constant is one whole number, which the engine can describe as another one on each rank."""
    return (
        len(constant.data) <= 8
        and all(size == 1 for size in constant.shape)
        and constant.dtype.startswith(("int", "uint", "bool"))
    )


def _node_form(node: Node, numbers: Mapping[Value, int], works: dict[Arg, int]) -> Hashable:
    free = varying(node.op)
    args = tuple("#" if p in free and type(arg) is int else _arg(arg, numbers) for p, arg in enumerate(node.args))
    kwargs = tuple((name, _arg(arg, numbers)) for name, arg in node.kwargs.items() if name not in NOT_OPERANDS)
    outputs = tuple((numbers[v], v.shape, v.dtype) for v in node.outputs)
    return node.op, args, kwargs, outputs, _meets(node, works) if node.communicates else None


def _meets(node: Node, works: dict[Arg, int]) -> Hashable:
    group: Any = node.kwargs.get("group", ())
    work = works.setdefault(node.kwargs.get("work"), len(works))
    return work, group if node.op == NEW_GROUP else len(group), "peer" in node.kwargs, "root" in node.kwargs


def _arg(arg: Arg, numbers: Mapping[Value, int]) -> Hashable:
    if type(arg) is Value:
        return ("%", numbers[arg])
    if type(arg) is tuple:
        return tuple(_arg(each, numbers) for each in arg)
    return (type(arg).__name__, arg) if isinstance(arg, (bool, int, float)) else arg  # 1, 1.0 and True are different


# ---------------------------------------------------------------------- one graph for many
def _together(graphs: Sequence[Graph]) -> Graph:
    """The first of the graphs, with one number per rank where they differ. It is that of the first rank if none does."""
    first = graphs[0]
    if len(graphs) == 1:
        return first
    known: dict[Hashable, Groups] = {}
    nodes = [_node([graph.nodes[place] for graph in graphs], known) for place in range(len(first.nodes))]
    made = Graph(first.name, first.inputs, first.outputs, nodes, mesh=first.mesh, rank=first.rank)
    made.assumptions, made.findings = first.assumptions, first.findings
    made.constants = dict(zip(first.constants, _columns(list(graph.constants.values()) for graph in graphs), strict=True))
    made.states = dict(zip(first.states, _columns(list(graph.states.values()) for graph in graphs), strict=True))
    return made


def _columns(rows: Any) -> list[Any]:
    return [Each.of(column) for column in zip(*rows, strict=True)]


def _node(nodes: Sequence[Node], known: dict[Hashable, Groups]) -> Node:
    first = nodes[0]
    args: tuple[Any, ...] = first.args
    for place in varying(first.op):
        if place < len(args) and type(args[place]) is int:
            args = (*args[:place], _number([node.args[place] for node in nodes]), *args[place + 1 :])
    kwargs: dict[str, Any] = dict(first.kwargs)
    if first.communicates:
        for name in PEERS:
            if any(name in node.kwargs for node in nodes):
                kwargs[name] = _number([node.kwargs.get(name, 0) for node in nodes])
        if "group" in kwargs:
            kwargs["group"] = _groups([node.kwargs["group"] for node in nodes], known)
    if args == first.args and kwargs == first.kwargs:
        return first
    return Node(first.op, args, kwargs, first.outputs, first.source, first.backward, first.writes)


def _number(numbers: Sequence[Any]) -> Any:
    return numbers[0] if all(number == numbers[0] for number in numbers) else PerRank(np.array(numbers))


def _groups(groups: Sequence[Any], known: dict[Hashable, Groups]) -> Any:
    """One group per rank; the same object for the same groups, of which programs have few."""
    if all(group is groups[0] or group == groups[0] for group in groups):
        return groups[0]
    key = tuple(groups)
    if key not in known:
        distinct = list(dict.fromkeys(groups))
        row_of = {group: row for row, group in enumerate(distinct)}
        known[key] = Groups(np.array(distinct, dtype=np.int64), np.array([row_of[group] for group in groups], dtype=np.int64))
    return known[key]
