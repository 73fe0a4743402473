"""Graphs as versioned JSON. Loading checks everything that it reads and runs nothing."""

from __future__ import annotations

import base64
import binascii
import json
import math
from typing import Any

from graphguard.errors import GraphFormatError, MalformedGraphError
from graphguard.graph.findings import KINDS, Finding
from graphguard.graph.ir import ITEM_SIZES, Arg, Constant, Graph, Layout, Mesh, Node, Source, Symbol, Value
from graphguard.graph.wellformed import require_wellformed

VERSION = 1
_DEEPEST = 64
_Sources = dict[tuple[Source, str], int]  # by line and module, as lines are equal in all modules


# ---------------------------------------------------------------------- writing
def dumps(graph: Graph) -> str:
    return json.dumps(to_plain(graph), separators=(",", ":"))


def to_plain(graph: Graph) -> dict[str, Any]:
    sources: _Sources = {}
    nodes = [_plain_node(node, sources) for node in graph.nodes]
    findings = [[f.kind, f.message, f.ranks, [_number_of(s, sources) for s in f.sources]] for f in graph.findings]
    return {
        "format": "graphguard-graph",
        "version": VERSION,
        "name": graph.name,
        "rank": graph.rank,
        "mesh": None if graph.mesh is None else graph.mesh.axes,
        "assumptions": graph.assumptions,
        "inputs": {name: _plain_value(value) for name, value in graph.inputs.items()},
        "constants": [
            [*_plain_value(value), base64.b64encode(constant.data).decode("ascii")]
            for value, constant in graph.constants.items()
        ],
        "nodes": nodes,
        "outputs": {path: None if value is None else value.id for path, value in graph.outputs.items()},
        "layouts": graph.layouts,
        "input_layouts": graph.input_layouts,
        "ties": graph.ties,
        "states": [[value.id, state] for value, state in graph.states.items()],
        "findings": findings,
        "sources": [_plain_source(source) for source, _ in sources],
    }


def _plain_value(value: Value) -> list[Any]:
    return [value.id, value.dtype, value.shape]


def _plain_source(source: Source) -> list[Any]:
    caller = None if source.caller is None else _plain_source(source.caller)
    return [source.file, source.line, source.function, caller, *([source.module] if source.module else [])]


def _number_of(source: Source, sources: _Sources) -> int:
    return sources.setdefault((source, source.module), len(sources))


def _plain_node(node: Node, sources: _Sources) -> list[Any]:
    return [
        node.op,
        [_plain_arg(arg) for arg in node.args],
        {name: _plain_arg(arg) for name, arg in node.kwargs.items()} if node.kwargs else {},
        [_plain_value(value) for value in node.outputs],
        None if node.source is None else _number_of(node.source, sources),
        node.backward,
        node.writes,
    ]


def _plain_arg(arg: Arg) -> Any:
    kind = type(arg)
    if kind is Value:
        return {"v": arg.id}  # type: ignore[union-attr]
    if kind is tuple:
        return [_plain_arg(item) for item in arg]  # type: ignore[union-attr]
    if kind is float:
        return arg if math.isfinite(arg) else {"f": repr(arg)}  # type: ignore[arg-type]
    if isinstance(arg, Symbol):
        return {"s": [arg.kind, arg.name]}
    if isinstance(arg, complex):
        return {"c": [repr(arg.real), repr(arg.imag)]}
    return arg


# ---------------------------------------------------------------------- reading
def loads(text: str | bytes) -> Graph:
    """The graph, or a GraphFormatError that says what is wrong with the file."""
    try:
        plain = json.loads(text)
    except RecursionError:
        raise GraphFormatError("not a graph file: it is nested too deeply") from None
    except ValueError as error:
        raise GraphFormatError(f"not a graph file: {error}") from None
    graph = from_plain(plain)
    try:
        require_wellformed(graph)
    except MalformedGraphError as error:
        raise GraphFormatError(f"damaged graph file: {error}") from None
    return graph


def from_plain(plain: object) -> Graph:
    try:
        return _Reader().graph(plain)
    except GraphFormatError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, binascii.Error) as error:
        raise GraphFormatError(f"damaged graph file: {type(error).__name__} while reading it ({error})") from None


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise GraphFormatError(f"damaged graph file: {what}")


class _Reader:
    def __init__(self) -> None:
        self._values: dict[int, Value] = {}
        self._sources: list[Source] = []

    def graph(self, plain: object) -> Graph:
        _expect(isinstance(plain, dict) and plain.get("format") == "graphguard-graph", "it does not say that it is one")
        assert isinstance(plain, dict)
        if plain.get("version") != VERSION:
            raise GraphFormatError(f"graph file of version {plain.get('version')!r}; this GraphGuard reads version {VERSION}")
        self._sources = [self._source(item) for item in self._list(plain["sources"], "sources")]
        graph = Graph(self._text(plain["name"]))
        graph.rank = None if plain["rank"] is None else self._natural(plain["rank"])
        if plain["mesh"] is not None:
            axes = self._list(plain["mesh"], "mesh axes")
            graph.mesh = Mesh(tuple((self._text(name), self._natural(size)) for name, size in axes))
        graph.assumptions = tuple(self._text(item) for item in self._list(plain["assumptions"], "assumptions"))
        graph.inputs = {self._text(name): self._value(item) for name, item in plain["inputs"].items()}
        for *value, data in self._list(plain["constants"], "constants"):
            defined = self._value(value)
            graph.constants[defined] = self._constant(defined, data)
        graph.nodes = [self._node(item) for item in self._list(plain["nodes"], "nodes")]
        graph.outputs = {self._text(path): None if id is None else self._known(id) for path, id in plain["outputs"].items()}
        graph.layouts, graph.input_layouts = (
            {self._text(path): self._layout(item) for path, item in plain[kind].items()}
            for kind in ("layouts", "input_layouts")
        )
        graph.ties = {self._text(name): self._text(first) for name, first in plain.get("ties", {}).items()}
        states = [self._list(item, "a state") for item in self._list(plain.get("states", []), "states")]
        graph.states = {self._known(id): self._text(state) for id, state in states}
        graph.findings = [self._finding(item) for item in self._list(plain["findings"], "findings")]
        return graph

    @staticmethod
    def _text(item: object) -> str:
        _expect(isinstance(item, str), f"a text is {type(item).__name__}")
        assert isinstance(item, str)
        if not item.isascii():
            _expect(not any("\ud800" <= character <= "\udfff" for character in item), "a text that is not Unicode")
        return item

    @staticmethod
    def _natural(item: object) -> int:
        _expect(type(item) is int and item >= 0, f"{item!r} is not a natural number")
        return item  # type: ignore[return-value]

    def _naturals(self, items: object) -> tuple[int, ...]:
        return tuple([self._natural(item) for item in self._list(items, "numbers")])

    @staticmethod
    def _list(items: object, what: str) -> list[Any]:
        _expect(isinstance(items, list), f"the {what} are no list")
        return items  # type: ignore[return-value]

    def _source(self, item: Any) -> Source:
        file, line, function, caller, *module = item
        called = None if caller is None else self._source(caller)
        source = Source(self._text(file), self._natural(line), self._text(function), called)
        return source.inside(*map(self._text, module)) if module else source

    def _value(self, item: Any) -> Value:
        id, dtype, shape = item
        _expect(dtype in ITEM_SIZES, f"{dtype!r} is not a dtype")
        _expect(self._natural(id) not in self._values, f"%{id} is defined twice")
        value = self._values[id] = Value(id, self._naturals(shape), dtype)
        return value

    def _known(self, id: object) -> Value:
        _expect(type(id) is int and id in self._values, f"%{id} is used before it is defined")
        return self._values[id]  # type: ignore[index]

    def _constant(self, value: Value, data: object) -> Constant:
        raw = base64.b64decode(self._text(data), validate=True)
        _expect(len(raw) == value.numel * ITEM_SIZES[value.dtype], f"constant {value} has {len(raw)} bytes")
        return Constant(value.dtype, value.shape, raw)

    def _node(self, item: Any) -> Node:
        op, args, kwargs, outputs, source, backward, writes = item
        _expect(isinstance(args, list) and isinstance(kwargs, dict), f"the arguments of {op!r}")
        _expect(type(backward) is bool, f"the phase of {op!r}")
        return Node(
            self._text(op),
            tuple([self._arg(arg) for arg in args]),
            {self._text(name): self._arg(arg) for name, arg in kwargs.items()},
            tuple([self._value(value) for value in self._list(outputs, f"outputs of {op!r}")]),
            None if source is None else self._sources[self._natural(source)],
            backward,
            tuple([self._text(name) for name in self._list(writes, f"writes of {op!r}")]),
        )

    def _arg(self, item: Any, depth: int = 0) -> Arg:
        _expect(depth < _DEEPEST, "an argument is nested too deeply")
        if isinstance(item, list):
            return tuple([self._arg(part, depth + 1) for part in item])
        if not isinstance(item, dict):
            _expect(item is None or isinstance(item, (bool, int, float, str)), "an argument of an unknown kind")
            return self._text(item) if isinstance(item, str) else item
        _expect(len(item) == 1, "an argument of an unknown kind")
        ((tag, content),) = item.items()
        match tag:
            case "v":
                return self._known(content)
            case "s":
                kind, name = content
                return Symbol(self._text(kind), self._text(name))
            case "f":
                return float(self._text(content))
            case "c":
                real, imaginary = content
                return complex(float(self._text(real)), float(self._text(imaginary)))
        raise GraphFormatError(f"damaged graph file: an argument of the unknown kind {tag!r}")

    def _layout(self, item: Any) -> Layout:
        shape, mesh_shape, mesh_ranks, placements, *by = item
        return Layout(
            self._naturals(shape),
            self._naturals(mesh_shape),
            self._naturals(mesh_ranks),
            tuple(self._text(placement) for placement in self._list(placements, "placements")),
            *map(self._text, by),
        )

    def _finding(self, item: Any) -> Finding:
        kind, message, ranks, sources = item
        _expect(kind in KINDS, f"{kind!r} is not a kind of finding")
        located = tuple(self._sources[index] for index in self._naturals(sources))
        return Finding(kind, self._text(message), self._naturals(ranks), located)
