"""Inputs on the path of a sample: the sample itself, and others near it for which both programs decide the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from graphguard.aten.kernels import tensor_of
from graphguard.aten.operators import DTYPES
from graphguard.capture.front import Along
from graphguard.graph.ancestry import needed_alone
from graphguard.oracle.draws import Given, Numbers, Ranges, Regime, draws_of
from graphguard.oracle.replay import Run

_NEAR = 1e-3  # how far inputs that decide are moved, relative to what they are


class OnPath:
    """What was decided is what was recorded, and no matter of which run comes first."""

    regime = Regime(1.0)

    def __init__(self, along: Along, ranges: Ranges):
        self.along, self.ranges = along, ranges
        self.sequential = along.raw.sequential
        needed = needed_alone(self.sequential, list(along.deciding[0]))
        self.deciding = {name for name, value in self.sequential.inputs.items() if value in needed}
        self._chosen = [{value: tensor_of(each) for value, each in known.items()} for known in along.deciding]

    def inputs(self, number: int, seed: int) -> Mapping[str, Given]:
        """Of a trial: the first has the sample."""
        sample = {name: tensor_of(constant) for name, constant in self.along.sample.items()}
        if number == 0:
            return {name: self._numbers(name, sample[name]) for name in self.sequential.inputs}
        generator = torch.Generator().manual_seed(seed + number)
        drawn = draws_of(self.sequential, self.ranges, self.regime, {})
        return {
            name: self._numbers(
                name, _near(sample[name], generator) if self._stays_near(name) else drawn[name].tensor(generator)
            )
            for name in self.sequential.inputs
        }

    def _numbers(self, name: str, numbers: torch.Tensor) -> Numbers:
        return Numbers(self.sequential.inputs[name].dtype, numbers, *self.ranges.get(name, (None, None)))

    def _stays_near(self, name: str) -> bool:
        """Whether an input decides, or is whole numbers, which may be positions."""
        return name in self.deciding or not DTYPES[self.sequential.inputs[name].dtype].is_floating_point

    def has(self, alone: Run, ranks: Sequence[Run]) -> bool:
        """Whether programs that were run are on the path. Of a part that does not decide it is not known."""
        return all(
            value in state.values and torch.equal(state.values[value], chosen)
            for state, each in zip([alone, *ranks], self._chosen, strict=True)
            for value, chosen in each.items()
        )


def _near(sample: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not sample.is_floating_point():
        return sample
    return sample * (1 + _NEAR * torch.randn(sample.shape, generator=generator, dtype=torch.float64))
