"""One operation of one rank that is about to be changed, and the tools to change it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from graphguard.graph.collectives import COLLECTIVES, WAIT, Share
from graphguard.graph.ir import Arg, Constant, Graph, Mesh, Node, Source, Value, values_in
from graphguard.graph.prune import prune

SUMS = {"aten.add.Tensor", "aten.sub.Tensor"}
PRODUCTS = {"aten.mm.default", "aten.bmm.default"}
ELEMENTWISE = {
    f"aten.{name}.default"
    for name in (
        "relu", "exp", "tanh", "sigmoid", "silu", "gelu", "neg", "rsqrt", "sqrt", "log", "cos", "sin", "clone", "abs", "square",
        "reciprocal", "detach", "alias", "bitwise_not",
    )
} | {"aten.pow.Tensor_Scalar", "aten.mul.Scalar", "aten.div.Scalar", "aten.add.Scalar", "aten.sub.Scalar"}  # fmt: skip
MOVES = {"aten.view.default", "aten.t.default", "aten.transpose.int", "aten.permute.default"}
_PASSED_ON = {"aten.clone.default", "aten.detach.default", "aten.alias.default", "aten._to_copy.default"}


@dataclass
class Site:
    """A node of a rank's graph. What is done here builds a new graph; the given one stays as it is.

    The functions that change programs draw what they choose from `random`, which is seeded alike on all ranks, so that ranks
    with the same program are changed alike.
    """

    graph: Graph
    position: int
    mesh: Mesh
    random: Random
    peer: Node | None = None  # the same operation on the next rank
    made: list[Node] = field(default_factory=list)
    renamed: dict[Value, Value] = field(default_factory=dict)
    constants: dict[Value, Constant] = field(default_factory=dict)
    elsewhere: dict[Node, dict[Value, Value]] = field(default_factory=dict)  # other names in one later node only
    removed: set[Node] = field(default_factory=set)
    returned: dict[str, Value | None] = field(default_factory=dict)  # other outputs
    _fresh: int = 0

    # ------------------------------------------------------------------ what is here
    @property
    def reduction(self) -> dict[str, Any]:
        """How a collective reduces: the operation, and the factor of a premultiplied sum."""
        return {key: self.node.kwargs[key] for key in ("reduce", "factor") if key in self.node.kwargs}

    @property
    def node(self) -> Node:
        return self.graph.nodes[self.position]

    @property
    def op(self) -> str:
        """The operator, without the mark of one that writes in place."""
        return base(self.node)

    @property
    def rank(self) -> int:
        assert self.graph.rank is not None
        return self.graph.rank

    @property
    def operands(self) -> list[Value]:
        return list(self.node.operands())

    @property
    def output(self) -> Value:
        return self.node.outputs[0]

    @property
    def group(self) -> tuple[int, ...]:
        return self.node.kwargs.get("group", ())  # type: ignore[return-value]

    def earlier(self) -> Iterator[Value]:
        """The values that are there before the node runs."""
        yield from self.graph.inputs.values()
        yield from self.graph.constants
        for node in self.graph.nodes[: self.position]:
            yield from node.outputs

    def maker(self, value: object) -> Node | None:
        return next((node for node in self.graph.nodes[: self.position] if value in node.outputs), None)

    def users(self, value: Value) -> list[Node]:
        return [node for node in self.graph.nodes if value in node.operands()]

    def is_used_once(self, value: Value) -> bool:
        uses = sum(list(node.operands()).count(value) for node in self.graph.nodes)
        return uses + list(self.graph.outputs.values()).count(value) == 1

    # ------------------------------------------------------------------ what is put here
    def value(self, shape: Sequence[int], dtype: str) -> Value:
        self._fresh += 1
        return Value(1 + max((value.id for value in self.graph.values()), default=0) + self._fresh, tuple(shape), dtype)

    def call(self, op: str, *args: Arg, shape: Sequence[int], dtype: str | None = None, **kwargs: Arg) -> Value:
        """A new operation before the rest; its dtype is that of its first operand."""
        first = next(values_in(args), None)
        output = self.value(shape, dtype or (first.dtype if first is not None else "float32"))
        self.put(op, args, kwargs, (output,))
        return output

    def give(self, op: str, *args: Arg, **kwargs: Arg) -> None:
        """The operation that makes the output that the node made."""
        self.put(op, args, kwargs, self.node.outputs)

    def put(self, op: str, args: tuple[Arg, ...], kwargs: Mapping[str, Arg], outputs: tuple[Value, ...]) -> None:
        self.made.append(Node(op, args, dict(kwargs), outputs, self.node.source, self.node.backward))

    def change(self, args: Sequence[Arg] | None = None, **kwargs: Arg) -> None:
        """The node itself, with other arguments."""
        node = self.node
        given = node.args if args is None else tuple(args)
        self.made.append(Node(node.op, given, {**node.kwargs, **kwargs}, node.outputs, node.source, node.backward, node.writes))

    def again(self, node: Node, args: Sequence[Arg], outputs: tuple[Value, ...]) -> None:
        """Another node's operation, put here, as one that writes nothing in place."""
        self.made.append(Node(base(node), tuple(args), dict(node.kwargs), outputs, node.source, node.backward))

    def communicate(self, op: str, args: tuple[Arg, ...], outputs: Sequence[Value], **kwargs: Arg) -> None:
        """Communication among the node's group, and the wait for it."""
        theirs = {name: self.node.kwargs[name] for name in ("group", "channel") if name in self.node.kwargs}
        self._fresh += 1
        work = 1 + self._fresh + max((_work(node) for node in self.graph.nodes if node.communicates), default=0)
        self.put(op, args, {**theirs, **kwargs, "work": work}, tuple(outputs))
        self.put(WAIT, (), {"work": work}, ())

    def collect(self, op: str, operand: Value, shape: Sequence[int], **kwargs: Arg) -> Value:
        """Communication of one tensor that gives one."""
        output = self.value(shape, operand.dtype)
        self.communicate(op, (operand,), (output,), **kwargs)
        return output

    def keep(self, value: Value, old: Value | None = None) -> None:
        """From here on, a value that is there already takes the place of the node's output."""
        self.renamed[old or self.output] = value

    def constant(self, constant: Constant) -> Value:
        value = self.value(constant.shape, constant.dtype)
        self.constants[value] = constant
        return value

    def reshaped(self, value: Value, shape: Sequence[int]) -> Value:
        return value if value.shape == tuple(shape) else self.call("aten.view.default", value, tuple(shape), shape=shape)

    def cut(self, value: Value, dim: int, start: int, end: int) -> Value:
        shape = list(value.shape)
        shape[dim] = end - start
        return self.call("aten.slice.Tensor", value, dim, start, end, shape=shape)

    # ------------------------------------------------------------------ the result
    def done(self) -> Graph:
        """The new graph, without what is not needed any more."""
        before, after = self.graph.nodes[: self.position], self.graph.nodes[self.position + 1 :]
        nodes = [*before, *self.made, *(renamed(node, self.elsewhere.get(node, self.renamed)) for node in after)]
        nodes = [node for node in nodes if node not in self.removed]
        started = {node.kwargs.get("work") for node in nodes if node.communicates and node.op != WAIT}
        changed = replace(
            self.graph,
            nodes=[node for node in nodes if node.op != WAIT or node.kwargs["work"] in started],
            outputs={path: self.renamed.get(v, v) if v is not None else None for path, v in self._outputs()},
            constants={**self.graph.constants, **self.constants},
        )
        prune(changed)
        return changed

    def _outputs(self) -> Iterator[tuple[str, Value | None]]:
        for path, value in self.graph.outputs.items():
            yield path, self.returned.get(path, value)

    def concerned(self) -> list[Node]:
        """Whose lines a report should name: the node, and those that use what it gave. Of something that is left out the line
        is gone: if nothing uses the result but the caller, it is the line that makes what is returned."""
        nodes = [self.node, *(user for output in self.node.outputs for user in self.users(output))]
        if len(nodes) == 1:
            nodes += [maker for value in self.renamed.values() for maker in self._makers(value)]
        return nodes

    def _makers(self, value: Value) -> Iterator[Node]:
        """The node that computes a value, and those that pass it on."""
        node = self.maker(value)
        while node is not None:
            yield node
            node = self.maker(node.args[0]) if base(node) in MOVES | _PASSED_ON else None


Change = Callable[[Site], str | None]  # what was done, in words; None where it cannot be done


def place(source: Source) -> tuple[str, int]:
    return source.file, source.line


def base(node: Node) -> str:
    return node.op.replace("_.", ".") if not node.communicates else node.op


def renamed(node: Node, names: Mapping[Value, Value]) -> Node:
    if not names or not any(value in names for value in node.operands()):
        return node
    args = tuple(substitute(arg, names) for arg in node.args)
    kwargs = {name: substitute(arg, names) for name, arg in node.kwargs.items()}
    return Node(node.op, args, kwargs, node.outputs, node.source, node.backward, node.writes)


def substitute(arg: Arg, names: Mapping[Value, Value]) -> Arg:
    if type(arg) is Value:
        return names.get(arg, arg)
    if type(arg) is tuple:
        return tuple(substitute(item, names) for item in arg)
    return arg


def same_type(a: object, b: object) -> bool:
    return type(a) is Value and type(b) is Value and a.shape == b.shape and a.dtype == b.dtype


def is_float(value: object) -> bool:
    return type(value) is Value and value.dtype.startswith(("float", "bfloat"))


def keeps_shape(node: Node) -> bool:
    """Communication of one tensor that gives one of the same shape."""
    share = COLLECTIVES[node.op].share if node.op in COLLECTIVES else None
    return share is Share.WHOLE or (share is Share.SPLIT and same_type(node.args[0], node.outputs[0]))


def is_elementwise(node: Node | None) -> bool:
    """Whether the node maps one tensor, element by element."""
    return (
        node is not None
        and base(node) in ELEMENTWISE
        and len(node.outputs) == 1
        and type(node.args[0]) is Value
        and sum(1 for _ in node.operands()) == 1
    )


def flat(value: Value) -> tuple[int]:
    return (math.prod(value.shape),)


def dims_of(value: Value, at_least: int, size: int = 2) -> list[int]:
    """The dims that have at least so many elements, if there are that many dims."""
    return [dim for dim, extent in enumerate(value.shape) if extent >= size] if len(value.shape) >= at_least else []


def _work(node: Node) -> int:
    work = node.kwargs.get("work")
    return work if isinstance(work, int) else 0
