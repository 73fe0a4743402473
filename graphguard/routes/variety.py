"""Which samples are tried: those that lead the sequential program different ways.

Many are drawn, in several looks, and the sequential program is run on each as far as the graph of the first one holds. Of those
that decide otherwise, one after the other is taken that is best in some way: the one whose numbers occur unequally often in its
parts, as equal counts hide faults; the one in which the fewest numbers occur, all tokens go one way, and a rank has none;
one with ties; and the one that is least like those that were taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from graphguard.aten.kernels import Kernels
from graphguard.capture.front import Problem
from graphguard.errors import ReplayError
from graphguard.graph.ancestry import needed_alone
from graphguard.graph.ir import Graph, Value
from graphguard.oracle.replay import Run, run, run_joint
from graphguard.oracle.slice import Programs, sliced
from graphguard.oracle.trial import local_inputs
from graphguard.relation.expectation import FULL, LOCAL
from graphguard.routes.decisions import Flow, decided_alone
from graphguard.routes.drawn import LOOKS, Drawn

PER_LOOK = 12  # samples that are drawn
MOST_NUMBERS = 64  # that are counted
Ways = tuple[bytes, ...]
Tried = tuple[Drawn, list[torch.Tensor]]  # a sample, and what is decided on it


class Variety:
    """Of samples beside a first one, whose problem is known. reads: what the sequential program read on it."""

    def __init__(self, first: Drawn, problem: Problem, reads: Sequence[Value]):
        assert problem.along is not None
        self.first, self.expected = first, problem.expected
        raw = problem.along.raw
        self.sequential = raw.sequential
        self.programs = sliced(Programs(raw.sequential, raw.joint, raw.relations), list(problem.along.of_ranks))
        self.of_ranks = list(problem.along.of_ranks)
        self.values = decision_values(self.sequential, reads)

    def different(self) -> Iterator[Drawn]:
        """Samples that decide differently. First one on which a rank decides otherwise than the sequential program."""
        taken = self._tried(self.first)
        others = [each for drawn in self._others() for each in self._tried(drawn)] if taken else []
        astray = next((each for each in others if not each[0].has_ties and self._goes_astray(each[0])), None)
        while others:
            seen = {_ways(values) for _, values in taken}
            others = [each for each in others if _ways(each[1]) not in seen]
            if not others:
                return
            merit = _MERITS[(len(taken) - 1) % len(_MERITS)]
            taken.append(astray or max(others, key=partial(merit, taken)))
            astray = None
            yield taken[-1][0]

    def _others(self) -> Iterator[Drawn]:
        for number in range(PER_LOOK):
            for place, look in enumerate(LOOKS):
                yield replace(self.first, seed=self.first.seed + 1 + number * len(LOOKS) + place, look=look)

    def _inputs(self, drawn: Drawn) -> dict[str, torch.Tensor]:
        return {name: drawn.input(name, value) for name, value in self.sequential.inputs.items()}

    def _tried(self, drawn: Drawn) -> list[Tried]:
        """A sample with what the sequential program decides, in a list; an empty one if it does not get so far."""
        try:
            return [(drawn, _evaluated(self.sequential, self.values, self._inputs(drawn)))]
        except (ReplayError, RuntimeError, IndexError):
            return []

    def _goes_astray(self, drawn: Drawn) -> bool:
        """Whether a rank decides otherwise than as the part of the sequential decision that it is to be."""
        inputs = self._inputs(drawn)
        try:
            alone = run(self.programs.sequential, inputs, wide=True)
            local = local_inputs(self.programs.relations, inputs)
            ranks = run_joint(self.programs.joint, local, wide=True)
            return any(self._differs(path, alone, rank, state) for path in self.of_ranks for rank, state in enumerate(ranks))
        except (ReplayError, RuntimeError, IndexError):
            return False

    def _differs(self, path: str, alone: Run, rank: int, state: Run) -> bool:
        mine, whole = state.outputs().get(path), alone.outputs()[path]
        graphs = self.expected[path].graphs
        graph = None if graphs is None else graphs[rank]
        if mine is None or whole is None or graph is None:
            return False
        wanted = run(graph, {FULL: whole}).outputs()[LOCAL]
        return wanted is not None and not torch.equal(mine, wanted)


def decision_values(sequential: Graph, reads: Sequence[Value]) -> list[Value]:
    """The first decisions of a program: those behind what it reads, or all that ranks may read, if it reads nothing. A decision
    that depends on another one is left out: on another path it may not be there."""
    decided = decided_alone(sequential, reads)
    found = [*decided.decisions, *decided.inputs.values()] or Flow.of(sequential).candidates()
    makers = {value: node for node in sequential.nodes for value in node.outputs}
    first = []
    for value in found:
        node = makers.get(value)
        before = needed_alone(sequential, list(node.operands())) if node is not None else set()
        if not any(other in before for other in found if other is not value):
            first.append(value)
    return first


def _evaluated(sequential: Graph, values: Sequence[Value], inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    state = Run(sequential, inputs, Kernels(wide=True))
    needed = needed_alone(sequential, list(values))
    with torch.no_grad():
        for node in sequential.nodes:
            if any(value in needed for value in node.outputs):
                state.execute(node)
    return [state.values[value] for value in values]


def _ways(values: Sequence[torch.Tensor]) -> Ways:
    return tuple(bytes(str((tuple(each.shape), each.tolist())), "ascii") for each in values)


# ---------------------------------------------------------------------- what speaks for a sample
def _is_uneven(taken: Sequence[Tried], each: Tried) -> float:
    """How many different counts there are, of every number in every part of the rows."""
    return sum(len({count for part in _parts(values) for count in _counts(part, values)}) for values in each[1])


def _is_one_way(taken: Sequence[Tried], each: Tried) -> float:
    return -sum(len(values.unique()) for values in each[1])


def _has_ties(taken: Sequence[Tried], each: Tried) -> float:
    return each[0].has_ties + _is_uneven(taken, each) / 1e6


def _is_far(taken: Sequence[Tried], each: Tried) -> float:
    """From the nearest of those that were taken, in how often the numbers occur where."""
    return min(float(torch.dist(_feature(each[1]), _feature(other[1]))) for other in taken)


_MERITS = (_is_uneven, _is_one_way, _has_ties, _is_far)


def _parts(values: torch.Tensor) -> list[torch.Tensor]:
    """Halves and quarters of the rows, as ranks may hold them."""
    if not values.dim() or values.shape[0] < 2:
        return [values]
    return [part for pieces in (1, 2, 4) for part in values.tensor_split(pieces)]


def _counts(part: torch.Tensor, values: torch.Tensor) -> list[int]:
    return [int((part == number).sum()) for number in values.unique()[:MOST_NUMBERS]]


def _feature(every: Sequence[torch.Tensor]) -> torch.Tensor:
    told = [0.0]
    for values in every:
        for part in _parts(values):
            numbers, counts = part.flatten().unique(return_counts=True)
            size = max(1, part.numel())
            told += [len(numbers) / size, float(counts.max()) / size if len(numbers) else 0.0]
            told.append(float(numbers.double().mean()) / (1.0 + float(values.double().abs().max())) if len(numbers) else 0.0)
    return torch.tensor(told, dtype=torch.float64)
