"""Which samples are tried: those that lead the sequential program different ways.

Many are drawn, in several looks, and the sequential program is run on each as far as the graph of the first one holds. Of those
that decide otherwise, the ones that are least like each other are taken: how many different numbers a decision has, how much of
it the most frequent one is, and how its first and last rows differ. So all tokens that go one way, a rank with none and ties are
found without a word for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from graphguard.aten.kernels import Kernels
from graphguard.errors import ReplayError
from graphguard.graph.ancestry import needed_alone
from graphguard.graph.ir import Graph, Value
from graphguard.oracle.replay import Run
from graphguard.routes.decisions import Flow, decided_alone
from graphguard.routes.drawn import LOOKS, Drawn

PER_LOOK = 12  # samples that are drawn
Ways = tuple[bytes, ...]


def different(first: Drawn, sequential: Graph, reads: Sequence[Value], count: int) -> list[Drawn]:
    """The first sample, and others that decide differently, as many as there are of `count`."""
    chosen, others = [first], list(_others(first, sequential, reads))
    seen = {_ways(each) for each in _decided(first, sequential, reads)}
    features = [_feature(each) for each in _decided(first, sequential, reads)]
    while len(chosen) < count and others:
        new = [(drawn, values) for drawn, values in others if _ways(values) not in seen]
        if not new:
            break
        far = [min((torch.dist(_feature(values), each).item() for each in features), default=0.0) for _, values in new]
        drawn, values = new[far.index(max(far))]
        chosen.append(drawn)
        seen.add(_ways(values))
        features.append(_feature(values))
        others = new
    return chosen


def _others(first: Drawn, sequential: Graph, reads: Sequence[Value]) -> Iterator[tuple[Drawn, list[torch.Tensor]]]:
    for number in range(PER_LOOK):
        for place, look in enumerate(LOOKS):
            drawn = replace(first, seed=first.seed + 1 + number * len(LOOKS) + place, look=look)
            for values in _decided(drawn, sequential, reads):
                yield drawn, values


def _decided(drawn: Drawn, sequential: Graph, reads: Sequence[Value]) -> list[list[torch.Tensor]]:
    """What the sequential program decides on a sample, in a list; an empty one if it does not get so far."""
    values = decision_values(sequential, reads)
    try:
        found = _evaluated(sequential, values, {name: drawn.input(name, each) for name, each in sequential.inputs.items()})
    except (ReplayError, RuntimeError, IndexError):
        return []
    return [found]


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


def _feature(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """What is said of decisions where they are compared: numbers between 0 and 1."""
    told = [0.0]
    for each in values:
        halves = each.tensor_split(2) if each.dim() and each.shape[0] > 1 else (each,)
        for part in (each, *halves):
            numbers, counts = part.flatten().unique(return_counts=True)
            told += [len(numbers) / max(1, part.numel()), float(counts.max()) / part.numel() if part.numel() else 0.0]
            told.append(float(numbers.double().mean()) / max(1.0, float(each.double().abs().max())) if len(numbers) else 0.0)
        told += [0.0] * (3 * (3 - 1 - len(halves)))
    return torch.tensor(told, dtype=torch.float64)
