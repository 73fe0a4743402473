"""One execution of both programs on random inputs: all tensors, and what is claimed of each output."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from graphguard.aten.kernels import Kernels, Lookup
from graphguard.aten.operators import DTYPES
from graphguard.errors import ReplayError
from graphguard.ir import Graph, Node, Value
from graphguard.joint import Joint
from graphguard.oracle.draws import Given, Regime, drawn
from graphguard.oracle.reference import NUDGE, Reference, reference
from graphguard.oracle.replay import Run, run, run_joint
from graphguard.oracle.watch import Watch

_OUTSIDE = ("out of range", "out of bounds", "index out")
_OF_WOBBLE = 10  # times the distance by which the ranks' own numbers are unsure
Tensors = dict[str, torch.Tensor]


class UndefinedError(Exception):
    """The sequential program indexes outside on these inputs."""


@dataclass
class Trial:
    """sequential, ranks: what was computed; all tensors at first, then the outputs alone.

    outside: operations of the ranks that index outside of a tensor, where torch raises; their results are nan.
    """

    seed: int
    regime: Regime
    draws: Mapping[str, Given]
    sequential: Run
    ranks: list[Run]
    references: dict[str, Reference]
    outside: dict[Node, str] = field(default_factory=dict)

    def keep_outputs(self) -> None:
        """Let all other tensors go: several trials at once would fill the memory."""
        for state in [self.sequential, *self.ranks]:
            kept = [value for value in state.graph.outputs.values() if value is not None]
            state.values = {value: state.values[value].clone() for value in kept}

    @property
    def overflows(self) -> bool:
        """Whether some rank returns infinities or what comes of them."""
        returned = [state.values[v] for state in self.ranks for v in state.graph.outputs.values() if v is not None]
        return any(not torch.isfinite(tensor).all() for tensor in returned if tensor.is_floating_point() or tensor.is_complex())

    def values(self, path: str) -> dict[int, torch.Tensor]:
        """What the ranks that return an output have."""
        found = {}
        for rank, state in enumerate(self.ranks):
            value = state.graph.outputs.get(path)
            if value is not None:
                found[rank] = state.values[value]
        return found


class Watched(Kernels):
    """Float64 kernels that say how far they are."""

    def __init__(self, watch: Watch | None = None):
        super().__init__(wide=True)
        self.watch = watch

    def run(self, node: Node, lookup: Lookup) -> Sequence[torch.Tensor]:
        if self.watch is not None:
            self.watch.step()
        return super().run(node, lookup)


class Forgiving(Watched):
    """Kernels for which an index outside of a tensor is no error but gives nan, as it differs from every value."""

    def __init__(self, watch: Watch | None = None):
        super().__init__(watch)
        self.outside: dict[Node, str] = {}

    def run(self, node: Node, lookup: Lookup) -> Sequence[torch.Tensor]:
        try:
            return super().run(node, lookup)
        except (IndexError, RuntimeError) as error:
            if not _is_outside(error):
                raise
            self.outside[node] = str(error).split("\n")[0]
            return [self._arbitrary(value) for value in node.outputs]

    def _arbitrary(self, value: Value) -> torch.Tensor:
        kind = self.dtype(DTYPES[value.dtype])
        if kind.is_floating_point or kind.is_complex:
            return torch.full(value.shape, math.nan, dtype=kind)
        return torch.full(value.shape, True if kind == torch.bool else torch.iinfo(kind).max // 2, dtype=kind)


def _is_outside(error: BaseException) -> bool:
    return isinstance(error, IndexError) or any(words in str(error) for words in _OUTSIDE)


def execute(
    sequential: Graph,
    joint: Joint,
    relations: Sequence[Graph],
    draws: Mapping[str, Given],
    regime: Regime,
    seed: int,
    watch: Watch | None = None,
) -> Trial:
    """Run both programs once, and the sequential one a second time on nudged inputs; where those are large, the ranks too."""
    inputs = drawn(draws, seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # that of the CPU alone: the others cost more than a small program
        alone = _alone(sequential, inputs, watch)
        moved = _alone(sequential, _nudged(inputs, seed), watch)
        kernels = Forgiving(watch)
        states = run_joint(joint, _local(relations, inputs), kernels=kernels)
        unsure = _random_outputs(sequential, inputs, alone)
        wobble = _wobble(joint, states, _local(relations, _nudged(inputs, seed))) if regime.scale > 1 else {}
    largest = max((float(t.abs().max()) for t in inputs.values() if t.is_floating_point() and t.numel()), default=1.0)
    references = {}
    for path, value in sequential.outputs.items():
        if value is not None and path not in unsure:
            rounds = alone.kernels.rounds or kernels.rounds
            exact = reference(alone.values[value], moved.values[value], largest, regime.scale > 1, rounds)
            references[path] = exact.loosened(_OF_WOBBLE * wobble.get(path, 0.0))
    return Trial(seed, regime, draws, alone, states, references, kernels.outside)


def _wobble(joint: Joint, states: Sequence[Run], nudged: list[Tensors]) -> dict[str, float]:
    """By output, how far a trifle moves what the ranks return. Where a softmax is saturated, the sequential program may have
    zeros that nothing moves; the ranks, which compute them in another way, have what large numbers leave of each other."""
    moves: dict[str, float] = {}
    for state, moved in zip(states, run_joint(joint, nudged, kernels=Forgiving()), strict=True):
        for path, value in state.graph.outputs.items():
            if value is not None and (state.values[value].is_floating_point() or state.values[value].is_complex()):
                distance = (moved.values[value] - state.values[value]).abs()
                distance = distance[torch.isfinite(distance)]
                moves[path] = max(moves.get(path, 0.0), float(distance.max()) if distance.numel() else 0.0)
    return moves


def _alone(sequential: Graph, inputs: Tensors, watch: Watch | None = None) -> Run:
    try:
        return run(sequential, inputs, kernels=Watched(watch))
    except ReplayError as error:
        if error.__cause__ is not None and _is_outside(error.__cause__):
            raise UndefinedError(str(error)) from None
        raise


def _local(relations: Iterable[Graph], inputs: Tensors) -> list[Tensors]:
    parts = [run(relation, inputs, wide=True).outputs() for relation in relations]
    return [{name: tensor for name, tensor in part.items() if tensor is not None} for part in parts]


def _nudged(inputs: Tensors, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed + 1)
    return {
        name: tensor * (1 + NUDGE * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
        if tensor.is_floating_point() or tensor.is_complex()
        else tensor
        for name, tensor in inputs.items()
    }


def _random_outputs(sequential: Graph, inputs: Tensors, alone: Run) -> set[str]:
    """Outputs that change when the sequential program is run again: nothing is claimed of random numbers."""
    if not draws_numbers(sequential):
        return set()
    again = _alone(sequential, inputs)
    changed = set()
    for path, value in sequential.outputs.items():
        if value is not None and not alone.values[value].nan_to_num().equal(again.values[value].nan_to_num()):
            changed.add(path)
    return changed


def draws_numbers(graph: Graph) -> bool:
    return any(not node.communicates and node.op != "gg.part" and Kernels.function(node.op)[1].random for node in graph.nodes)
