"""One execution of both programs: all tensors, and what is claimed of each output."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from graphguard.aten.custom import is_custom
from graphguard.aten.kernels import Kernels, Lookup
from graphguard.aten.operators import DTYPES
from graphguard.errors import ReplayError, UnsteadyError
from graphguard.graph.ir import Graph, Node, Value
from graphguard.graph.matching import Joint
from graphguard.oracle.draws import Given, Regime, drawn
from graphguard.oracle.progress import Watch
from graphguard.oracle.reference import NUDGE, Reference, Slack, reference
from graphguard.oracle.replay import Run, run, run_joint

_OUTSIDE = ("out of range", "out of bounds", "index out")
Tensors = dict[str, torch.Tensor]


class UndefinedError(Exception):
    """The sequential program indexes outside on these inputs."""


@dataclass
class Trial:
    """sequential, ranks: what was computed; all tensors at first, then the outputs alone.

    outside: operations of the ranks that index outside of a tensor, where torch raises; their results are nan.
    unsure: by output and rank, how far the numbers of further runs on the same inputs are away. looks: how many there were.
    """

    seed: int
    regime: Regime
    draws: Mapping[str, Given]
    sequential: Run
    ranks: list[Run]
    references: dict[str, Reference]
    outside: dict[Node, str] = field(default_factory=dict)
    unsure: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    looks: int = 0

    def keep_outputs(self) -> None:
        """Let all other tensors go: several trials at once would fill the memory."""
        for state in [self.sequential, *self.ranks]:
            kept = [value for value in state.graph.outputs.values() if value is not None]
            state.values = {value: state.values[value].clone() for value in kept}

    def doubt(self, path: str, rank: int) -> Slack:
        """By element, how far a rank's numbers are from those of further runs."""
        return self.unsure.get(path, {}).get(rank, 0.0)

    def doubts(self, path: str) -> Sequence[torch.Tensor]:
        """The same for all ranks that return an output; nothing if there was no further run."""
        return list(self.unsure.get(path, {}).values())

    def wavers(self, path: str) -> bool:
        """Whether further runs gave other numbers than rounding alone explains."""
        reference = self.references[path]
        least = float(reference.tolerance.min()) if reference.tolerance.numel() else 0.0
        return not bool(reference.claimed.all()) or any(bool((each > least).any()) for each in self.doubts(path))

    def forgive_overflow(self) -> None:
        """Numbers of the ranks that are not finite are no longer held against them."""
        self.references = {path: replace(each, lenient=True) for path, each in self.references.items()}

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
        self.steady: set[str] = set()  # operators that were seen to be a function of their operands

    def run(self, node: Node, lookup: Lookup) -> Sequence[torch.Tensor]:
        if self.watch is not None:
            self.watch.step()
        results = super().run(node, lookup)
        if node.op not in self.steady and node.op != "gg.part":
            self._see_that_it_is_steady(node, lookup, results)
        return results

    def _see_that_it_is_steady(self, node: Node, lookup: Lookup, results: Sequence[torch.Tensor]) -> None:
        """An operator of the user's own may have a state, or draw random numbers, and not say so."""
        function, operator = self.function(node.op)
        self.steady.add(node.op)
        if is_custom(function) and not operator.random:
            again = super().run(node, lookup)
            if any(not _are_equal(one, other) for one, other in zip(results, again, strict=True)):
                name = node.op.removesuffix(".default")
                raise UnsteadyError(
                    f"{name} at {node.source} gives other numbers when it is run again on equal operands; nothing can be said "
                    "of a program that changes from run to run, so make the operator a function of its operands"
                )


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
    """Run both programs once, and the sequential one a second time on nudged inputs."""
    inputs = drawn(draws, seed)
    kernels = Forgiving(watch)
    with seeded(seed):
        alone = alone_on(sequential, inputs, Watched(watch))
        moved = alone_on(sequential, _nudged(inputs, seed), Watched(watch))
        unsure = _random_outputs(sequential, inputs, alone)
    with seeded(seed + 1):
        states = run_joint(joint, local_inputs(relations, inputs), kernels=kernels)
    largest = max((float(t.abs().max()) for t in inputs.values() if t.is_floating_point() and t.numel()), default=1.0)
    references = {}
    for path, value in sequential.outputs.items():
        if value is not None and path not in unsure:
            rounds = alone.kernels.rounds or kernels.rounds
            references[path] = reference(alone.values[value], moved.values[value], largest, rounds)
    return Trial(seed, regime, draws, alone, states, references, kernels.outside)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Programs that draw random numbers draw the same ones each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # that of the CPU alone: the others cost more than a small program
        yield


def alone_on(sequential: Graph, inputs: Tensors, kernels: Kernels) -> Run:
    try:
        return run(sequential, inputs, kernels=kernels)
    except ReplayError as error:
        if error.__cause__ is not None and _is_outside(error.__cause__):
            raise UndefinedError(str(error)) from None
        raise


def local_inputs(relations: Iterable[Graph], inputs: Tensors) -> list[Tensors]:
    parts = [run(relation, inputs, wide=True).outputs() for relation in relations]
    return [{name: tensor for name, tensor in part.items() if tensor is not None} for part in parts]


def _nudged(inputs: Tensors, seed: int) -> Tensors:
    """Inputs that are moved by a trifle. Equal numbers stay equal, and simple ones, such as zero, stay what they are."""
    return {name: _moved(tensor, seed) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()} | {
        name: torch.complex(_moved(tensor.real, seed), _moved(tensor.imag, seed))
        for name, tensor in inputs.items()
        if tensor.is_complex()
    }


def _moved(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    simple = tensor.to(torch.float32).to(torch.float64) == tensor
    return torch.where(simple, tensor, tensor * (1 + NUDGE * 2 * torch.sin(1e4 * tensor.abs() + seed)))


def _random_outputs(sequential: Graph, inputs: Tensors, alone: Run) -> set[str]:
    """Outputs that change when the sequential program is run again: nothing is claimed of random numbers."""
    if not draws_numbers(sequential):
        return set()
    again = alone_on(sequential, inputs, Watched())
    return {
        path
        for path, value in sequential.outputs.items()
        if value is not None and not _are_equal(alone.values[value], again.values[value])
    }


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.nan_to_num().equal(other.nan_to_num()))


def draws_numbers(graph: Graph) -> bool:
    return any(not node.communicates and node.op != "gg.part" and Kernels.function(node.op)[1].random for node in graph.nodes)
