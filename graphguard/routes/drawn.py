"""Samples of the inputs: drawn by name, so that every process draws the same, in looks that lead programs different ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

import torch

from graphguard.aten.operators import DTYPES
from graphguard.graph.ir import Value
from graphguard.oracle.draws import Bound, Draw, Regime

TIES = "ties"
LOOKS = ("random", "alike", TIES, "halves", "positive", "far apart")
_REGIMES = {"positive": Regime(1.0, positive=True), "far apart": Regime(4.0)}
_NEAR = 0.05  # of what rows differ by, that is left where they are alike
_TIE = 2  # numbers are multiples of one half where there are ties


@dataclass(frozen=True)
class Drawn:
    """A sample. fixed: inputs whose values are stated. bounds: of the others, `low <= v < high`."""

    seed: int
    look: str = "random"
    bounds: Mapping[str, tuple[Bound, Bound]] = field(default_factory=dict)
    fixed: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def input(self, name: str, value: Value) -> torch.Tensor:
        """As the programs' graphs are run: floats are float64."""
        if name in self.fixed:
            given = self.fixed[name]
            return given.to(torch.float64) if given.is_floating_point() else given
        low, high = self.bounds.get(name, (None, None))
        kind = DTYPES[value.dtype]
        if not (kind.is_floating_point or kind.is_complex or kind == torch.bool) and low is None and high is None:
            low, high = 0, 2  # so few that they are in the range of what they index, if they index
        generator = torch.Generator().manual_seed(self._number(name, "numbers"))
        numbers = Draw(value.shape, value.dtype, low, high, _REGIMES.get(self.look, Regime(1.0))).tensor(generator)
        return self._looking(name, numbers, low, high) if kind.is_floating_point else numbers

    @property
    def has_ties(self) -> bool:
        return self.look == TIES

    def received(self, ordinal: int) -> None:
        """The sequential program has no other ranks."""

    def _looking(self, name: str, numbers: torch.Tensor, low: Bound, high: Bound) -> torch.Tensor:
        if self.has_ties and low is None and high is None:
            return (numbers * _TIE).round() / _TIE
        if numbers.dim() < 2 or not numbers.numel() or self._number(name, "look") % 2:
            return numbers
        if self.look == "alike":
            return _alike(numbers)
        if self.look == "halves":
            return torch.cat([_alike(each) for each in numbers.tensor_split(2) if each.shape[0]])
        return numbers

    def _number(self, name: str, what: str) -> int:
        return int(sha256(f"{self.seed}/{name}/{what}".encode()).hexdigest()[:12], 16)


def _alike(numbers: torch.Tensor) -> torch.Tensor:
    """Rows that are nearly the first one, and between it and what they were, so that bounds are kept."""
    first = numbers[:1]
    return first + _NEAR * (numbers - first)
