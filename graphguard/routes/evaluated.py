"""Tensors whose values follow from what is given: constants, decisions, what was received. They are computed when asked for."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphguard.aten.kernels import Kernels, leaves_unwritten, looks_unwritten
from graphguard.errors import ReplayError
from graphguard.graph.ir import Graph, Node, Value
from graphguard.graph.operators import name_of

LARGEST = 1 << 20  # elements; what is larger is not computed
_SHAPE_ALONE = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}  # of their first operand

# What these find among positions follows no rule that a proof could see.
_FINDS = {"sort", "argsort", "topk", "kthvalue", "median", "mode", "nonzero", "bincount", "histc", "searchsorted", "bucketize"}

_CANNOT = (ReplayError, RuntimeError, IndexError, TypeError, ValueError)


def is_whole(value: Value) -> bool:
    return value.dtype.startswith(("int", "uint", "bool"))


class Known:
    """Evaluates a graph backwards from what is asked for. Nothing that depends on an unknown tensor has data."""

    def __init__(self, graph: Graph, given: Mapping[Value, torch.Tensor]):
        self._kernels = Kernels()
        self._data: dict[Value, torch.Tensor | None] = {}
        self._told: set[Value] = set()  # those that rest on data, not on positions alone
        self._unwritten: set[Value] = set()
        self._nodes = {value: node for node in graph.nodes for value in node.outputs}
        for value, constant in graph.constants.items():
            if value.numel <= LARGEST:
                self.tell(value, self._kernels.tensor(constant))
        for value, tensor in given.items():
            self.tell(value, tensor)

    def tell(self, value: Value, tensor: torch.Tensor) -> None:
        self._data[value] = tensor.detach()
        self._told.add(value)

    def data(self, value: object) -> torch.Tensor | None:
        """The elements of a tensor, if all of them are known."""
        if type(value) is not Value:
            return None
        pending = [value]
        while pending:  # chains of in-place updates get deeper than Python's recursion limit
            here = pending[-1]
            missing = [] if here in self._data else self._missing(here)
            pending += missing
            if not missing:
                pending.pop()
        found = self._data[value]
        if found is None or (value in self._unwritten and (found.dtype == torch.bool or looks_unwritten(found))):
            return None
        return found

    def rests_on_data(self, value: Value) -> bool:
        """Whether a known tensor depends on numbers that were given, or that were found, and not on positions alone."""
        return self.data(value) is not None and value in self._told

    def _missing(self, value: Value) -> list[Value]:
        """Compute a tensor, or say which ones must be computed first."""
        node = self._nodes.get(value)
        if node is None or _is_beyond(node):
            self._data[value] = None
            return []
        read = [] if name_of(node.op) in _SHAPE_ALONE else list(node.operands())
        missing = [each for each in read if each not in self._data]
        if missing:
            return missing
        if any(self._data[each] is None for each in read):
            self._data.update(dict.fromkeys(node.outputs))
            return []
        try:
            self._compute(node, read)
        except _CANNOT:  # there is no kernel on the CPU, or it would raise in the program, too: then nothing is known
            self._data.update({output: None for output in node.outputs if output not in self._data})
        return []

    def _compute(self, node: Node, read: list[Value]) -> None:
        def lookup(value: Value) -> torch.Tensor:
            found = self._data.get(value)
            return torch.zeros(value.shape, dtype=getattr(torch, value.dtype)) if found is None else found

        results = self._kernels.run(node, lookup)
        for output, tensor in zip(node.outputs, results, strict=False):
            self._data.setdefault(output, tensor)  # what was given stays
            if any(each in self._told for each in read) or name_of(node.op) in _FINDS:
                self._told.add(output)
            if leaves_unwritten(node.op) or any(each in self._unwritten for each in read):
                self._unwritten.add(output)


def _is_beyond(node: Node) -> bool:
    """Whether only the ranks together, or chance, would know what a node gives."""
    if node.communicates or node.op.startswith("gg.") or any(value.numel > LARGEST for value in node.outputs):
        return True
    try:
        return Kernels.function(node.op)[1].random
    except ReplayError:  # no operator of this process
        return True
