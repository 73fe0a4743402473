"""Ranks that one graph stands for: where they differ, an argument is one number per rank, or one group per rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from graphguard.graph.collectives import NEW_GROUP, WAIT
from graphguard.graph.ir import Graph, Layout, Node, Value

Numbers = np.ndarray[Any, np.dtype[Any]]


class PerRank:
    """One whole number per rank, as an argument of a node. Equal ones are equal arguments."""

    __slots__ = ("key", "numbers")

    def __init__(self, numbers: Numbers):
        self.numbers = np.ascontiguousarray(numbers, dtype=np.int64)
        self.key = self.numbers.tobytes()

    def at(self, place: int) -> int:
        return int(self.numbers[place])

    def kept(self, places: Numbers) -> int | PerRank:
        """That of some of the ranks; one number if they all have it."""
        numbers = self.numbers[places]
        return int(numbers[0]) if (numbers == numbers[0]).all() else PerRank(numbers)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return type(other) is PerRank and self.key == other.key

    def __repr__(self) -> str:
        first = ", ".join(map(str, self.numbers[:4]))
        return f"<{first}, .. {self.numbers[-1]}>" if len(self.numbers) > 4 else f"<{first}>"

    def __reduce__(self) -> Any:
        return PerRank, (self.numbers,)


def numbers_in(arg: Any, lanes: int) -> Numbers:
    """A number of a class, one per rank."""
    return arg.numbers if type(arg) is PerRank else np.full(lanes, arg, dtype=np.int64)


class Groups:
    """One group per rank: the members of all of them, a row each, and which row each rank's is."""

    __slots__ = ("members", "rows")

    def __init__(self, members: Numbers, rows: Numbers):
        self.members, self.rows = members, rows

    @property
    def size(self) -> int:
        return int(self.members.shape[1])

    def at(self, place: int) -> tuple[int, ...]:
        return tuple(self.members[self.rows[place]].tolist())

    def kept(self, places: Numbers) -> Groups:
        return Groups(self.members, self.rows[places])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Groups):
            return False
        return np.array_equal(self.members, other.members) and np.array_equal(self.rows, other.rows)

    def __hash__(self) -> int:
        return hash(self.rows.tobytes())

    def __reduce__(self) -> Any:
        return Groups, (self.members, self.rows)


class Each:
    """One thing per rank that is no argument: a constant, or the state of a generator."""

    __slots__ = ("items",)

    def __init__(self, items: Sequence[Any]):
        self.items = tuple(items)

    @staticmethod
    def of(items: Sequence[Any]) -> Any:
        """What all ranks have, if they have the same."""
        return items[0] if all(item == items[0] for item in items) else Each(items)

    def at(self, place: int) -> Any:
        return self.items[place]

    def kept(self, places: Numbers) -> Any:
        return Each.of([self.items[place] for place in places])

    def __eq__(self, other: object) -> bool:
        return type(other) is Each and self.items == other.items

    def __hash__(self) -> int:
        return hash(self.items)

    def __reduce__(self) -> Any:
        return Each, (self.items,)


_OF_RANKS = (PerRank, Groups, Each)


@dataclass
class RankClass:
    """`relation` says which inputs the ranks have, `graph` what they do with them. Ranks are in order."""

    ranks: Numbers
    relation: Graph
    graph: Graph

    @property
    def lanes(self) -> int:
        return len(self.ranks)

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The ranks, as plain numbers."""
        return tuple(self.ranks.tolist())

    def at(self, rank: int) -> list[Graph]:
        """What a capture of that rank alone gives: its input relation, and its program."""
        (place,) = np.flatnonzero(self.ranks == rank)
        return [_at(self.relation, int(place), rank, "inputs of rank"), _at(self.graph, int(place), rank, "rank")]

    def keep(self, places: Numbers) -> None:
        """Leave the other ranks to other classes."""
        self.ranks = self.ranks[places]
        self.__dict__.pop("members", None)
        for graph in (self.relation, self.graph):
            _change(graph, _once(lambda arg: arg.kept(places)))

    def part(self, places: Numbers) -> RankClass:
        """A class of some of the ranks, which shares no value and no node with this one."""
        kept, own = _once(lambda arg: arg.kept(places)), _Copies()
        rank = int(self.ranks[places[0]])
        return RankClass(self.ranks[places], *(_copied(graph, own, kept, rank) for graph in (self.relation, self.graph)))


def _once(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same change of the same argument is made once."""
    known: dict[int, Any] = {}

    def changed(arg: Any) -> Any:
        if id(arg) not in known:
            known[id(arg)] = change(arg), arg  # alive, so that its id is its own
        return known[id(arg)][0]

    return changed


class _Copies(dict[Value, Value]):
    """New values for others. Random numbers that nothing uses have a state, and are no longer in the graph."""

    def __missing__(self, value: Value) -> Value:
        made = self[value] = Value(value.id, value.shape, value.dtype)
        return made


def _at(graph: Graph, place: int, rank: int, name: str) -> Graph:
    """A graph of its own: values and nodes are told apart by their identity."""
    made = _copied(graph, _Copies(), lambda arg: arg.at(place), rank)
    nodes: list[Node] = []
    built = 0
    for position, node in enumerate(made.nodes):
        if node.kwargs.get("channel") == 0:  # which is not written
            node.kwargs = {key: arg for key, arg in node.kwargs.items() if key != "channel"}
        nodes.append(node)
        if node.op == NEW_GROUP and rank in node.kwargs["group"]:  # type: ignore[operator]
            nodes.append(Node(WAIT, (), {"work": node.kwargs["work"]}, (), node.source, node.backward))
        built = len(nodes) if position < graph.built else built
    made.name, made.nodes, made.built, made.findings = f"{name} {rank}", nodes, built, []
    return made


def _copied(graph: Graph, own: _Copies, change: Callable[[Any], Any], rank: int) -> Graph:
    """The same graph with values and nodes of its own, and with other arguments where they are of many ranks."""

    def changed(arg: Any) -> Any:
        kind = type(arg)
        if kind is Value:
            return own[arg]
        if kind is tuple:
            return tuple([changed(item) for item in arg])
        return change(arg) if kind in _OF_RANKS else arg

    def part(layouts: dict[str, Layout]) -> dict[str, Layout]:
        return {path: layout._replace(mesh_ranks=changed(layout.mesh_ranks)) for path, layout in layouts.items()}

    def copied(node: Node) -> Node:
        kwargs = {key: changed(arg) for key, arg in node.kwargs.items()} if node.kwargs else {}
        outputs = tuple([own[value] for value in node.outputs])
        return Node(node.op, changed(node.args), kwargs, outputs, node.source, node.backward, node.writes)

    return replace(
        graph,
        rank=rank,
        inputs={key: own[value] for key, value in graph.inputs.items()},
        outputs={path: value and own[value] for path, value in graph.outputs.items()},
        nodes=[copied(node) for node in graph.nodes],
        constants={own[value]: _mapped(constant, change) for value, constant in graph.constants.items()},
        layouts=part(graph.layouts),
        input_layouts=part(graph.input_layouts),
        ties=dict(graph.ties),
        states={own[value]: _mapped(state, change) for value, state in graph.states.items()},
        findings=list(graph.findings),
    )


def _change(graph: Graph, change: Callable[[Any], Any]) -> None:
    graph.nodes = [_changed(node, change) for node in graph.nodes]
    graph.constants = {value: _mapped(constant, change) for value, constant in graph.constants.items()}
    graph.states = {value: _mapped(state, change) for value, state in graph.states.items()}
    graph.layouts = {path: _layout(layout, change) for path, layout in graph.layouts.items()}
    graph.input_layouts = {path: _layout(layout, change) for path, layout in graph.input_layouts.items()}


def _changed(node: Node, change: Callable[[Any], Any]) -> Node:
    """The same node with other arguments where they are of many ranks; the very same one where none is."""
    args, kwargs = _mapped(node.args, change), {key: _mapped(arg, change) for key, arg in node.kwargs.items()}
    if args is node.args and all(kwargs[key] is arg for key, arg in node.kwargs.items()):
        return node
    return Node(node.op, args, kwargs, node.outputs, node.source, node.backward, node.writes)


def _mapped(arg: Any, change: Callable[[Any], Any]) -> Any:
    kind = type(arg)
    if kind in _OF_RANKS:
        return change(arg)
    if kind is not tuple:
        return arg
    items = tuple([_mapped(item, change) for item in arg])
    return arg if all(mine is its for mine, its in zip(items, arg, strict=True)) else items


def _layout(layout: Layout, change: Callable[[Any], Any]) -> Layout:
    return layout._replace(mesh_ranks=_mapped(layout.mesh_ranks, change))


def layout_at(layout: Layout, place: int) -> Layout:
    """A layout of a class as the rank at a place of it has it; the very same one where all ranks have it."""
    ranks = _mapped(layout.mesh_ranks, lambda arg: arg.at(place))
    return layout if ranks is layout.mesh_ranks else layout._replace(mesh_ranks=ranks)


def node_at(node: Node, place: int) -> Node:
    """A node of a class as the rank at a place of it has it."""
    return _changed(node, lambda arg: arg.at(place))


def same_graph(one: Graph, other: Graph) -> bool:
    """Whether two graphs are equal but for the names of their values and works."""
    return _Twins().graphs(one, other)


class _Twins:
    """Values and works of one graph, each with the one that stands in its place in another."""

    def __init__(self) -> None:
        self._of: dict[Any, Any] = {}
        self._works: dict[Any, Any] = {}
        self._back: dict[Any, Any] = {}  # the works of the other

    def graphs(self, one: Graph, other: Graph) -> bool:
        return (
            self._made(one.inputs, other.inputs)
            and self._made_of(list(one.constants), list(other.constants))
            and list(one.constants.values()) == list(other.constants.values())
            and len(one.nodes) == len(other.nodes)
            and all(map(self._nodes, one.nodes, other.nodes))
            and list(one.outputs) == list(other.outputs)
            and all(map(self._args, one.outputs.values(), other.outputs.values()))
            and list(one.states.values()) == list(other.states.values())
            and all(map(self._drawn, one.states, other.states))
            and _around(one) == _around(other)
        )

    def _made(self, mine: dict[str, Value], others: dict[str, Value]) -> bool:
        return list(mine) == list(others) and self._made_of(list(mine.values()), list(others.values()))

    def _made_of(self, mine: Sequence[Value], others: Sequence[Value]) -> bool:
        self._of.update(zip(mine, others, strict=False))
        return len(mine) == len(others) and all(
            a.shape == b.shape and a.dtype == b.dtype for a, b in zip(mine, others, strict=True)
        )

    def _nodes(self, mine: Node, its: Node) -> bool:
        return (
            mine.op == its.op
            and mine.source == its.source
            and mine.backward == its.backward
            and mine.writes == its.writes
            and self._args(mine.args, its.args)
            and list(mine.kwargs) == list(its.kwargs)
            and all(self._keyword(name, arg, its.kwargs[name]) for name, arg in mine.kwargs.items())
            and self._made_of(mine.outputs, its.outputs)
        )

    def _keyword(self, name: str, mine: Any, its: Any) -> bool:
        if name != "work":
            return self._args(mine, its)
        return bool(self._works.setdefault(mine, its) == its and self._back.setdefault(its, mine) == mine)

    def _args(self, mine: Any, its: Any) -> bool:
        kind = type(mine)
        if kind is not type(its):
            return False
        if kind is Value:
            return self._of.get(mine) is its
        if kind is tuple:
            return len(mine) == len(its) and all(map(self._args, mine, its))
        if kind is float:  # where nan is itself, and 0.0 is not -0.0
            return repr(mine) == repr(its)
        return bool(mine == its)

    def _drawn(self, mine: Value, its: Value) -> bool:
        """What was drawn and then left out of the graph stands nowhere."""
        return self._of.get(mine, its) is its


def _around(graph: Graph) -> Any:
    about = graph.layouts, graph.input_layouts, graph.ties, graph.built, graph.rank, graph.mesh
    return about, graph.assumptions, graph.findings
