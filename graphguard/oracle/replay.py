"""Runs captured graphs on given tensors: the sequential one alone, or all ranks in lockstep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from graphguard.aten.kernels import Kernels
from graphguard.errors import ReplayError
from graphguard.graph.collectives import NEW_GROUP
from graphguard.graph.ir import Graph, Node, Value
from graphguard.graph.matching import Joint, Match
from graphguard.oracle.collectives import exchange

Tensors = Mapping[str, torch.Tensor]

_SAVE_AS_THEY_LIKE = {"aten._embedding_bag.default", "aten._embedding_bag_forward_only.default"}


class Run:
    """The values of one graph while it runs, and after."""

    def __init__(self, graph: Graph, inputs: Tensors, kernels: Kernels):
        missing = [name for name in graph.inputs if name not in inputs]
        if missing:
            raise ReplayError(f"{graph.name}: no tensor is given for the input {missing[0]!r}")
        self.graph, self.kernels, self.position = graph, kernels, 0
        self.put_off: list[Node] = []
        self.awaited: dict[object, list[Value]] = {}  # what each work fills
        self.values: dict[Value, torch.Tensor] = {}
        for name, value in graph.inputs.items():
            given = kernels.cast(inputs[name].detach())
            if tuple(given.shape) != value.shape:
                raise ReplayError(f"{graph.name}: input {name!r} has shape {tuple(given.shape)}, not {value.shape}")
            self.values[value] = given
        for value, constant in graph.constants.items():
            self.values[value] = kernels.tensor(constant)

    def execute(self, node: Node) -> None:
        try:
            results = self.kernels.run(node, self.values.__getitem__)
        except ReplayError:
            raise
        except Exception as error:
            raise ReplayError(f"{self.graph.name}: {node} failed: {error}") from error
        for value, result in zip(node.outputs, results, strict=False):
            if tuple(result.shape) != value.shape:
                if not self._is_used(value):  # what an operator saves for its backward depends on the backend
                    continue
                if node.op in _SAVE_AS_THEY_LIKE and value is not node.outputs[0]:
                    self.values[value] = result  # only their own backward reads it, which knows
                    continue
                raise ReplayError(f"{self.graph.name}: {node} gave shape {tuple(result.shape)}")
            self.values[value] = result

    def _is_used(self, value: Value) -> bool:
        return value in self.graph.outputs.values() or any(value in node.operands() for node in self.graph.nodes)

    @property
    def done(self) -> bool:
        return self.position == len(self.graph.nodes) and not self.put_off

    def advance(self) -> Node | None:
        """Run up to the next node that communicates, and return it unexecuted; None at the end, or when a value is needed
        that other ranks have yet to send."""
        while (node := self._next_ready()) is not None:
            if not node.communicates:
                self.execute(node)
            elif node.op != "dist.wait":
                self.awaited.setdefault(node.kwargs["work"], []).extend(node.outputs)
                return node
        return None

    def _next_ready(self) -> Node | None:
        """In the order of the program, but for nodes that need what is still in flight: those are put off, so that the rest
        of a buffer can be sent while a part of it is received."""
        for index, node in enumerate(self.put_off):
            if self._is_ready(node):
                return self.put_off.pop(index)
        while self.position < len(self.graph.nodes):
            node = self.graph.nodes[self.position]
            waits = node.op == "dist.wait"
            if waits and any(value not in self.values for value in self.awaited.get(node.kwargs["work"], ())):
                return None
            self.position += 1
            if self._is_ready(node):
                return node
            self.put_off.append(node)
        return None

    def _is_ready(self, node: Node) -> bool:
        return all(value in self.values for value in node.operands())

    def outputs(self) -> dict[str, torch.Tensor | None]:
        return {path: None if value is None else self.values[value] for path, value in self.graph.outputs.items()}


def replay(graph: Graph, inputs: Tensors, *, wide: bool = False) -> dict[str, torch.Tensor | None]:
    """The outputs of a graph that does not communicate. `wide` runs all floats in float64."""
    return run(graph, inputs, wide=wide).outputs()


def run(graph: Graph, inputs: Tensors, *, wide: bool = False, kernels: Kernels | None = None) -> Run:
    state = Run(graph, inputs, kernels or Kernels(wide))
    with torch.no_grad():
        node = state.advance()
    if node is not None:
        raise ReplayError(f"{graph.name} communicates ({node}); replay all ranks together")
    return state


def replay_joint(joint: Joint, inputs: Sequence[Tensors], *, wide: bool = False) -> list[dict[str, torch.Tensor | None]]:
    """The outputs of every rank, with the collectives' real meaning."""
    return [state.outputs() for state in run_joint(joint, inputs, wide=wide)]


def run_joint(joint: Joint, inputs: Sequence[Tensors], *, wide: bool = False, kernels: Kernels | None = None) -> list[Run]:
    states = run_as_far_as_it_goes(joint, inputs, kernels or Kernels(wide))
    waiting = [rank for rank, state in enumerate(states) if not state.done]
    if waiting:
        raise ReplayError(f"ranks {waiting} wait for values that never come")
    return states


def run_as_far_as_it_goes(joint: Joint, inputs: Sequence[Tensors], kernels: Kernels) -> list[Run]:
    """The same of ranks that may not be captured to their ends: each runs until it needs what no rank sends."""
    states = [Run(graph, given, kernels) for graph, given in zip(joint.graphs, inputs, strict=True)]
    posted: dict[int, set[int]] = {}
    moved = True
    with torch.no_grad():
        while moved:
            moved = False
            for rank, state in enumerate(states):
                for node in _until_stuck(state):
                    moved = True
                    match = joint.matched(node)
                    ready = posted.setdefault(match.id, set()) if match is not None else set()
                    ready.add(rank)
                    if match is not None and match.op != NEW_GROUP and len(ready) == len(match.group):
                        _deliver(match, states)
    return states


def _until_stuck(state: Run) -> Iterator[Node]:
    while (node := state.advance()) is not None:
        yield node


def _deliver(match: Match, states: Sequence[Run]) -> None:
    operands = {rank: [states[rank].values[v] for v in node.operands()] for rank, node in match.nodes.items()}
    for rank, results in exchange(match, operands).items():
        for value, result in zip(match.nodes[rank].outputs, results, strict=True):
            states[rank].values[value] = result.reshape(value.shape)
