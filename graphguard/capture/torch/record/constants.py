"""The values that a program may read while it is recorded: those that follow from constants alone."""

from __future__ import annotations

import torch

from graphguard.aten.kernels import Kernels, leaves_unwritten, looks_unwritten
from graphguard.graph.ir import Graph, Node, Value

_LARGEST = 1 << 24  # elements; reading a value that needs more than this is refused rather than slow


class NotConstant(Exception):
    """A value depends on this one, which is not known: an input, random numbers, memory never written, other ranks. Of inputs,
    and of what other ranks send, a sample of the inputs knows it."""

    def __init__(self, culprit: str, of_inputs: bool = False):
        super().__init__(culprit)
        self.culprit, self.of_inputs = culprit, of_inputs


class ConstantFolder:
    """Evaluates slices of the graph on demand, each node at most once."""

    def __init__(self, graph: Graph, kernels: Kernels):
        self._graph, self.kernels = graph, kernels
        self._known: dict[Value, torch.Tensor] = {}
        self._definitions: dict[Value, Node] = {}
        self._indexed = 0
        self._saw_unwritten = False

    def tensor(self, value: Value) -> torch.Tensor:
        for node in self._graph.nodes[self._indexed :]:
            for output in node.outputs:
                self._definitions[output] = node
        self._indexed = len(self._graph.nodes)
        pending = [value]
        while pending:  # explicit stack: chains of in-place updates get deeper than Python's recursion limit
            current = pending[-1]
            if current in self._known:
                pending.pop()
                continue
            missing = self._prepare(current)
            if missing:
                pending += missing
            else:
                pending.pop()
        result = self._known[value]
        if self._saw_unwritten and looks_unwritten(result):
            raise NotConstant("memory that was never written")
        return result

    def read(self, value: Value) -> torch.Tensor:
        """What the program is told when it asks for a value."""
        return self.tensor(value)

    def forget_after(self, count: int) -> None:
        """Nodes from this number on are no longer in the graph."""
        self._indexed = min(self._indexed, count)

    def _prepare(self, value: Value) -> list[Value]:
        """Compute a value, or say which ones must be computed first."""
        constant = self._graph.constants.get(value)
        if constant is not None:
            self._known[value] = self.kernels.tensor(constant)
            return []
        node = self._definitions.get(value)
        if node is None:
            names = [name for name, v in self._graph.inputs.items() if v is value]
            raise NotConstant(f"the input {names[0]!r}" if names else "a tensor without a value", bool(names))
        self._refuse(node, value)
        self._saw_unwritten |= leaves_unwritten(node.op)
        missing = [v for v in node.operands() if v not in self._known]
        if not missing:
            results = self.kernels.run(node, self._known.__getitem__)
            self._known.update(zip(node.outputs, results, strict=False))
        return missing

    @staticmethod
    def _refuse(node: Node, value: Value) -> None:
        if node.communicates:
            raise NotConstant(f"what other ranks send ({node.op} at {node.source})", True)
        if node.op.startswith("gg."):
            raise NotConstant("an input")
        if Kernels.function(node.op)[1].random:
            raise NotConstant(f"random numbers ({node.op} at {node.source})")
        if value.numel > _LARGEST:
            raise NotConstant(f"a constant of {value.numel} elements, too many to evaluate while capturing")
