"""The values that a program may read along the path of a sample: those that the graph recorded so far has on it.

They are computed in float64, as in the execution that looks at the path later: which way a program takes must not be a matter
of rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from graphguard.aten.kernels import Kernels
from graphguard.aten.operators import DTYPES
from graphguard.capture.torch.record.constants import ConstantFolder, NotConstant
from graphguard.capture.torch.world.objects import ObjectsMissing
from graphguard.graph.collectives import WAIT
from graphguard.graph.ir import Graph, Node, Value

READ = "(read) "  # begins the names of outputs that keep what was read in the graph


class ValuesMissing(ObjectsMissing):
    """What is read depends on inputs that are not placed yet, or on what other ranks send: they must come further first."""


class Sample(Protocol):
    """What a program is told of its inputs and of other ranks."""

    def input(self, name: str, value: Value) -> torch.Tensor | None: ...
    def received(self, ordinal: int) -> Sequence[torch.Tensor] | None: ...


@dataclass
class RankSample:
    """Of a rank. given: its inputs, once they are known. arrived: by number of the communication, what it gives the rank."""

    given: Mapping[str, torch.Tensor] | None = None
    arrived: Mapping[int, Sequence[torch.Tensor]] = field(default_factory=dict)

    def input(self, name: str, value: Value) -> torch.Tensor | None:
        return None if self.given is None else self.given[name]

    def received(self, ordinal: int) -> Sequence[torch.Tensor] | None:
        return self.arrived.get(ordinal)


class SampledFolder(ConstantFolder):
    """Answers what the program reads from constants, else from the sample. `reads` are the values that it needed the sample
    for."""

    def __init__(self, graph: Graph, kernels: Kernels, sample: Sample):
        super().__init__(graph, kernels)
        self._on_sample = _OnSample(graph, sample)
        self._reads: dict[Value, None] = {}

    def read(self, value: Value) -> torch.Tensor:
        try:
            return self.tensor(value)
        except NotConstant as reason:
            if not reason.of_inputs:
                raise
        found = self._on_sample.tensor(value)
        self._reads[value] = None
        return found.to(DTYPES[value.dtype])

    def forget_after(self, count: int) -> None:
        super().forget_after(count)
        self._on_sample.forget_after(count)

    def keep_reads(self) -> None:
        """What was read is an output of the graph, so that nothing on the way to it is dropped."""
        there = set(self._graph.values())
        for number, value in enumerate(value for value in self._reads if value in there):
            self._graph.outputs[f"{READ}{number}"] = value


class _OnSample(ConstantFolder):
    def __init__(self, graph: Graph, sample: Sample):
        super().__init__(graph, Kernels(wide=True))
        self._sample = sample
        self._ordinals: dict[Node, int] = {}
        self._counted = 0

    def forget_after(self, count: int) -> None:
        super().forget_after(count)
        self._counted = min(self._counted, count)  # what is forgotten does not communicate

    def _prepare(self, value: Value) -> list[Value]:
        node = self._definitions.get(value)
        if node is None and value not in self._graph.constants:
            name = next((name for name, each in self._graph.inputs.items() if each is value), None)
            if name is not None:
                self._known[value] = self.kernels.cast(self._answer(self._sample.input(name, value)))
                return []
        if node is not None and node.communicates:
            given = self._sample.received(self._ordinal(node))
            if given is None:
                raise ValuesMissing
            self._known.update(zip(node.outputs, given, strict=True))
            return []
        return super()._prepare(value)

    @staticmethod
    def _answer(tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is None:
            raise ValuesMissing
        return tensor

    def _ordinal(self, node: Node) -> int:
        """The number of a communication among those of its program."""
        for each in self._graph.nodes[self._counted :]:
            if is_numbered(each):
                self._ordinals[each] = len(self._ordinals)
        self._counted = len(self._graph.nodes)
        return self._ordinals[node]


def is_numbered(node: Node) -> bool:
    return node.communicates and node.op != WAIT


def reads_of(graph: Graph) -> list[Value]:
    """What `keep_reads` kept."""
    return [value for path, value in graph.outputs.items() if path.startswith(READ) and value is not None]


def without_reads(graph: Graph) -> None:
    graph.outputs = {path: value for path, value in graph.outputs.items() if not path.startswith(READ)}
