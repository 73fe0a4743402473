"""Classes of ranks joined: those whose programs differ in numbers alone, and only where a number may differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from graphguard.graph.collectives import NEW_GROUP
from graphguard.graph.ir import Arg, Constant, Graph, Layout, Node, Value
from graphguard.graph.operators import VARYING, name_of
from graphguard.graph.paths import in_one
from graphguard.graph.rank_class import Each, Groups, PerRank, RankClass, numbers_in

PEERS = ("channel", "peer", "tag", "root")  # numbers that only the matching of ranks looks at
NOT_OPERANDS = frozenset({"group", "work", *PEERS})


def classes_of(graphs: Sequence[Graph], relations: Sequence[Graph], apart: bool = False) -> list[RankClass]:
    """The ranks by class, in the order of their first ranks; or each by itself."""
    pairs = enumerate(zip(relations, graphs, strict=True))
    alone = [RankClass(np.array([rank], dtype=np.int64), *pair) for rank, pair in pairs]
    return alone if apart else joined(alone)


def joined(classes: Sequence[RankClass], exactly: bool = False) -> list[RankClass]:
    """As few classes as there are programs. `exactly`: each rank is still told to be all that it was, its lines and layouts,
    too; else only what it computes and communicates is."""
    operators = [tuple(node.op for node in each.graph.nodes) for each in classes]
    often = Counter(operators)
    found: dict[Hashable, list[RankClass]] = {}
    for each, own in zip(classes, operators, strict=True):
        form = own if often[own] == 1 else _whole_form(each, exactly)  # which takes far longer to make
        found.setdefault(form, []).append(each)
    return [alike[0] if len(alike) == 1 else _Joining(alike, exactly).made() for alike in found.values()]


def varying(operator: str) -> tuple[int, ...]:
    """The arguments in which ranks of one class may have different whole numbers."""
    return (2,) if operator == "gg.part" else VARYING.get(name_of(operator), ())


# ---------------------------------------------------------------------- what ranks of one class have in common
def _whole_form(held: RankClass, exactly: bool) -> Hashable:
    return tuple((_form(graph), _surroundings(graph) if exactly else None) for graph in (held.graph, held.relation))


def _form(graph: Graph) -> Hashable:
    numbers = {value: number for number, value in enumerate(graph.values())}
    works: dict[Arg, int] = {}
    constants = tuple((v.shape, v.dtype, *_fixed(constant)) for v, constant in graph.constants.items())
    nodes = tuple(_node_form(node, numbers, works) for node in graph.nodes)
    inputs = tuple((name, v.shape, v.dtype) for name, v in graph.inputs.items())
    outputs = tuple((path, None if v is None else numbers[v]) for path, v in graph.outputs.items())
    drawn = tuple(numbers.get(value) for value in graph.states)
    return inputs, constants, nodes, outputs, drawn


def _surroundings(graph: Graph) -> Hashable:
    """What else is said of a rank."""
    lines = tuple((node.source, node.backward, node.writes) for node in graph.nodes)
    layouts = tuple(
        (path, layout._replace(mesh_ranks=(len(layout.mesh_ranks),)))
        for each in (graph.layouts, graph.input_layouts)
        for path, layout in each.items()
    )
    told = tuple(finding.message for finding in graph.findings)
    return lines, layouts, len(graph.layouts), tuple(graph.ties.items()), graph.built, graph.assumptions, told


def _fixed(constant: Any) -> tuple[object, ...]:
    """What of a constant is the same on all ranks of a class: nothing, if it is a whole number."""
    items = constant.items if type(constant) is Each else (constant,)
    if all(map(_is_number, items)):
        return ()
    return (constant.data,) if type(constant) is Constant else (id(constant),)


def _is_number(constant: Constant) -> bool:
    """Whether a constant is one whole number, which the engine can describe as another one on each rank."""
    return (
        len(constant.data) <= 8
        and all(size == 1 for size in constant.shape)
        and constant.dtype.startswith(("int", "uint", "bool"))
    )


def _node_form(node: Node, numbers: Mapping[Value, int], works: dict[Arg, int]) -> Hashable:
    free = varying(node.op)
    args = tuple("#" if p in free and _may_vary(arg) else _arg(arg, numbers) for p, arg in enumerate(node.args))
    kwargs = tuple((name, _arg(arg, numbers)) for name, arg in node.kwargs.items() if name not in NOT_OPERANDS)
    outputs = tuple((numbers[v], v.shape, v.dtype) for v in node.outputs)
    return node.op, args, kwargs, outputs, _meets(node, works) if node.communicates else None


def _may_vary(arg: Any) -> bool:
    return type(arg) is int or type(arg) is PerRank


def _meets(node: Node, works: dict[Arg, int]) -> Hashable:
    group: Any = node.kwargs.get("group", ())
    work = works.setdefault(node.kwargs.get("work"), len(works))
    size = group.size if type(group) is Groups else len(group)
    return work, group if node.op == NEW_GROUP else size, "peer" in node.kwargs, "root" in node.kwargs


def _arg(arg: Any, numbers: Mapping[Value, int]) -> Hashable:
    if type(arg) is Value:
        return ("%", numbers[arg])
    if type(arg) is tuple:
        return tuple(_arg(each, numbers) for each in arg)
    if type(arg) in (PerRank, Groups):
        return ("of one class", id(arg))  # no number may vary here: it is like no other
    return (type(arg).__name__, arg) if isinstance(arg, (bool, int, float)) else arg  # 1, 1.0 and True are different


# ---------------------------------------------------------------------- one graph for many
class _Joining:
    """Classes of one form, which become one: the first of their graphs, with one number per rank where they differ."""

    def __init__(self, classes: Sequence[RankClass], exactly: bool):
        self._classes, self._exactly = classes, exactly
        self._lanes = [each.lanes for each in classes]
        ranks = np.concatenate([each.ranks for each in classes])
        self._order = np.argsort(ranks)
        self._ranks = ranks[self._order]
        self._known: dict[Hashable, Any] = {}  # groups: the same object for the same ones, of which programs have few

    def made(self) -> RankClass:
        relation, graph = (self._graph([getattr(each, name) for each in self._classes]) for name in ("relation", "graph"))
        return RankClass(self._ranks, relation, graph)

    def _graph(self, graphs: Sequence[Graph]) -> Graph:
        first = graphs[0]
        nodes = [self._node([graph.nodes[place] for graph in graphs]) for place in range(len(first.nodes))]
        made = Graph(first.name, first.inputs, first.outputs, nodes, mesh=first.mesh, rank=first.rank)
        made.assumptions, made.findings = first.assumptions, first.findings
        made.constants = dict(zip(first.constants, self._columns([graph.constants for graph in graphs]), strict=True))
        made.states = dict(zip(first.states, self._columns([graph.states for graph in graphs]), strict=True))
        if not self._exactly:
            return made
        layouts = self._layouts([graph.layouts for graph in graphs])
        input_layouts = self._layouts([graph.input_layouts for graph in graphs])
        return replace(made, layouts=layouts, input_layouts=input_layouts, ties=first.ties, built=first.built)

    def _node(self, nodes: Sequence[Node]) -> Node:
        first = nodes[0]
        args: tuple[Any, ...] = first.args
        for place in varying(first.op):
            if place < len(args) and _may_vary(args[place]):
                args = (*args[:place], self._number([node.args[place] for node in nodes]), *args[place + 1 :])
        kwargs: dict[str, Any] = dict(first.kwargs)
        if first.communicates:
            for name in PEERS:
                if any(name in node.kwargs for node in nodes):
                    kwargs[name] = self._number([node.kwargs.get(name, 0) for node in nodes])
            if "group" in kwargs:
                kwargs["group"] = self._groups([node.kwargs["group"] for node in nodes])
        source = first.source
        if source is not None and any(node.module != first.module for node in nodes):
            source = source.inside(in_one(node.module for node in nodes))
        if args == first.args and kwargs == first.kwargs and source is first.source:
            return first
        return Node(first.op, args, kwargs, first.outputs, source, first.backward, first.writes)

    # ------------------------------------------------------------------ one thing per rank
    def _number(self, numbers: Sequence[Any]) -> Any:
        if all(type(number) is not PerRank and number == numbers[0] for number in numbers):
            return numbers[0]
        columns = [numbers_in(number, lanes) for number, lanes in zip(numbers, self._lanes, strict=True)]
        return PerRank(np.concatenate(columns)[self._order])

    def _groups(self, groups: Sequence[Any]) -> Any:
        """One group per rank."""
        if all(type(group) is tuple and group == groups[0] for group in groups):
            return groups[0]
        key = tuple(group if type(group) is tuple else id(group) for group in groups)  # alive as long as the classes are
        if key not in self._known:
            row_of: dict[tuple[int, ...], int] = {}
            rows = []
            for group, lanes in zip(groups, self._lanes, strict=True):
                given = [group] if type(group) is tuple else list(map(tuple, group.members.tolist()))
                numbers = np.array([row_of.setdefault(each, len(row_of)) for each in given], dtype=np.int64)
                rows.append(np.broadcast_to(numbers, lanes) if type(group) is tuple else numbers[group.rows])
            self._known[key] = Groups(np.array(list(row_of), dtype=np.int64), np.concatenate(rows)[self._order])
        return self._known[key]

    def _columns(self, tables: Sequence[Mapping[Value, Any]]) -> list[Any]:
        return [self._each(column) for column in zip(*(table.values() for table in tables), strict=True)]

    def _each(self, items: Sequence[Any]) -> Any:
        if all(type(item) is not Each and item == items[0] for item in items):
            return items[0]
        listed = [item.items if type(item) is Each else (item,) * n for item, n in zip(items, self._lanes, strict=True)]
        flat = [item for each in listed for item in each]
        return Each.of([flat[place] for place in self._order])

    def _layouts(self, tables: Sequence[Mapping[str, Layout]]) -> dict[str, Layout]:
        made = {}
        for path, layout in tables[0].items():
            ranks = zip(*(table[path].mesh_ranks for table in tables), strict=True)
            made[path] = layout._replace(mesh_ranks=tuple(map(self._number, ranks)))
        return made
