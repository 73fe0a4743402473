"""A pass between capture and proof: operators at known positions become slices, concatenations, sums and products.

Nothing is assumed: where the given tensors have the given values, each replacement computes the same tensor. `same_on` compares
the two graphs on a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from graphguard.aten.kernels import constant_of
from graphguard.graph.ir import Arg, Graph, Node, Value
from graphguard.graph.operators import name_of
from graphguard.graph.prune import prune
from graphguard.routes.builder import Builder
from graphguard.routes.evaluated import Known, is_whole
from graphguard.routes.rules import RULES, Site

SPELLED = 1 << 12  # elements; more than these stay one constant


def lowered(graph: Graph, known: Mapping[Value, torch.Tensor] | None = None) -> Graph:
    """The graph on the path where tensors have the `known` values. What follows from those, and from the constants of the
    graph, is known, too: whole numbers become constants, and operators at known positions are spelled out.

    Outputs that are `known` themselves stay what computes them, so that a proof can relate them. Values that are not replaced
    are those of the graph that was given.
    """
    return _Lowering(graph, known or {}).run()


def lowered_constants(graph: Graph) -> Graph | None:
    """The graph on its only path, if an operator reads or writes at positions that are constants of it, and not ranges."""
    if not any(is_whole(value) and value.shape for value in graph.constants):
        return None
    if not any(_plain(node.op) in RULES for node in graph.nodes):
        return None
    lowering = _Lowering(graph, {})
    made = lowering.run()
    return made if lowering.replaced else None


class _Lowering:
    def __init__(self, graph: Graph, given: Mapping[Value, torch.Tensor]):
        self._graph, self._given = graph, given
        self._known = Known(graph, given)
        self._nodes: list[Node] = []
        self._build = Builder(self._nodes, max((value.id for value in graph.values()), default=0))
        self._instead: dict[Value, Value] = {}
        self._constants = dict(graph.constants)
        self._written: dict[Value, Value] = {}  # known whole numbers that became constants
        self.replaced = 0

    def run(self) -> Graph:
        for node in self._graph.nodes:
            self._build.stand_for(node)
            self._step(node)
        outputs = {path: value and self._output(value) for path, value in self._graph.outputs.items()}
        made = replace(self._graph, outputs=outputs, nodes=self._nodes, constants=self._constants, built=0)
        prune(made)
        return made

    def _output(self, value: Value) -> Value:
        return value if value in self._given else self._spelled(value)  # type: ignore[return-value]

    def _step(self, node: Node) -> None:
        if node.outputs and all(map(self._is_folded, node.outputs)):
            return
        if not self._replace(node):
            args, kwargs = self._spelled(node.args), {name: self._spelled(arg) for name, arg in node.kwargs.items()}
            self._nodes.append(Node(node.op, args, kwargs, node.outputs, node.source, node.backward, node.writes))  # type: ignore[arg-type]

    def _replace(self, node: Node) -> bool:
        """Write what a rule makes of a node. True if the node itself is not needed any more."""
        rule, before = RULES.get(_plain(node.op)), len(self._nodes)
        if rule is None:
            return False
        args: Any = self._held(node.args)
        results = rule(
            Site(node, self._known, self._build), *args, **{name: self._held(arg) for name, arg in node.kwargs.items()}
        )
        each = results if isinstance(results, tuple) else (results,)
        if results is None or not all(map(_is_in_place_of, each, node.outputs)):
            del self._nodes[before:]
            return False
        self.replaced += 1
        self._instead.update({old: new for old, new in zip(node.outputs, each, strict=True) if new is not None})
        left = [old for old, new in zip(node.outputs, each, strict=True) if new is None and not self._is_number(old)]
        return not left and not any(value in self._given for value in node.outputs)

    def _is_folded(self, value: Value) -> bool:
        """Whether a value is known by its numbers, so that nothing needs to compute it."""
        return value not in self._given and is_whole(value) and self._known.rests_on_data(value)

    def _is_number(self, value: Value) -> bool:
        return is_whole(value) and self._known.rests_on_data(value)

    def _held(self, arg: Arg) -> Arg:
        """An argument of a rule: known whole numbers are constants, as the rule itself looks at those that are positions."""
        if type(arg) is tuple:
            return tuple(map(self._held, arg))
        if type(arg) is not Value or arg in self._instead or not self._is_number(arg):
            return self._instead.get(arg, arg) if type(arg) is Value else arg
        return self._constant(arg)

    def _spelled(self, arg: Arg) -> Arg:
        """An argument of a node that stays: known whole numbers are written out."""
        if type(arg) is tuple:
            return tuple(map(self._spelled, arg))
        if type(arg) is not Value:
            return arg
        if arg not in self._instead and self._is_number(arg):
            data = self._known.data(arg)
            assert data is not None
            self._instead[arg] = self._build.numbers(data, arg.dtype) if arg.numel <= SPELLED else self._constant(arg)
        return self._instead.get(arg, arg)

    def _constant(self, value: Value) -> Value:
        if value in self._constants:
            return value
        if value not in self._written:
            data = self._known.data(value)
            assert data is not None
            made = self._written[value] = self._build.fresh(value.shape, value.dtype)
            self._constants[made] = constant_of(data)
        return self._written[value]


def _is_in_place_of(new: Value | None, old: Value) -> bool:
    """Whether a tensor is of the kind that a node gives. A rule that makes another one does not know what torch does there."""
    return new is None or (new.shape == old.shape and new.dtype == old.dtype)


def _plain(op: str) -> str:
    """The name without the underscore of an operator that writes: a graph has the new value as its output."""
    space, name, overload = op.split(".") if op.count(".") == 2 else (op, "", "")
    return f"{space}.{name_of(op)}.{overload}" if name else op
