"""Random inputs: how each is drawn, as a tensor and as the line of a script that draws the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from graphguard.aten.operators import DTYPES
from graphguard.ir import Graph, Value

Bound = float | int | None
Ranges = Mapping[str, tuple[Bound, Bound]]
_UNBOUNDED = 8  # integers that nothing bounds are drawn from as far below zero and above it


class Regime(NamedTuple):
    """What floats without bounds look like: their size, and whether they are positive."""

    scale: float
    positive: bool = False


REGIMES = (Regime(1.0), Regime(0.25), Regime(1.0, positive=True), Regime(3.0))


class Given(Protocol):
    """One input: its numbers, and the lines of a script that give them a name."""

    def tensor(self, generator: torch.Generator) -> torch.Tensor: ...
    def lines(self, name: str) -> list[str]: ...


@dataclass(frozen=True)
class Draw:
    """One input. `low <= v < high`; None is no bound."""

    shape: tuple[int, ...]
    dtype: str
    low: Bound
    high: Bound
    regime: Regime

    def tensor(self, generator: torch.Generator) -> torch.Tensor:
        kind = DTYPES[self.dtype]
        if kind == torch.bool:
            return torch.rand(self.shape, generator=generator) < 0.5
        if not (kind.is_floating_point or kind.is_complex):
            low, high = self._whole_bounds()
            return torch.randint(low, high, self.shape, generator=generator).to(kind)
        if kind.is_complex:
            return torch.randn(self.shape, generator=generator, dtype=torch.complex128) * self.regime.scale
        if self.low is not None and self.high is not None:
            return torch.rand(self.shape, generator=generator, dtype=torch.float64) * (self.high - self.low) + self.low
        normal = torch.randn(self.shape, generator=generator, dtype=torch.float64) * self.regime.scale
        if self.low is not None:
            return normal.abs() + self.low
        if self.high is not None:
            return self.high - normal.abs() - 1e-6
        return normal.abs() + 0.01 if self.regime.positive else normal

    def lines(self, name: str) -> list[str]:
        return [f"{name} = {self.code()}"]

    def code(self) -> str:
        """The expression that gives the same tensor, with the generator named `g`."""
        kind = DTYPES[self.dtype]
        if kind == torch.bool:
            return f"torch.rand({self.shape}, generator=g) < 0.5"
        if not (kind.is_floating_point or kind.is_complex):
            low, high = self._whole_bounds()
            return f"torch.randint({low}, {high}, {self.shape}, generator=g).to({kind})"
        if kind.is_complex:
            return f"torch.randn({self.shape}, generator=g, dtype=torch.complex128) * {self.regime.scale!r}"
        if self.low is not None and self.high is not None:
            uniform = f"torch.rand({self.shape}, generator=g, dtype=torch.float64)"
            return f"{uniform} * {self.high - self.low!r} + {self.low!r}"
        normal = f"torch.randn({self.shape}, generator=g, dtype=torch.float64) * {self.regime.scale!r}"
        if self.low is not None:
            return f"({normal}).abs() + {self.low!r}"
        if self.high is not None:
            return f"{self.high!r} - ({normal}).abs() - 1e-6"
        return f"({normal}).abs() + 0.01" if self.regime.positive else normal

    def _whole_bounds(self) -> tuple[int, int]:
        low = None if self.low is None else math.ceil(self.low)
        high = None if self.high is None else math.ceil(self.high)
        if low is None and high is None:
            unsigned = DTYPES[self.dtype] in (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
            low, high = 0 if unsigned else -_UNBOUNDED, _UNBOUNDED
        elif low is None:
            assert high is not None
            low = high - 2 * _UNBOUNDED
        elif high is None:
            high = low + 2 * _UNBOUNDED
        return low, max(high, low + 1)


def draws_of(sequential: Graph, ranges: Ranges, regime: Regime) -> dict[str, Draw]:
    """How each sequential input is drawn, in the order of the inputs."""
    return {name: _draw(value, ranges.get(name, (None, None)), regime) for name, value in sequential.inputs.items()}


def _draw(value: Value, bounds: tuple[Bound, Bound], regime: Regime) -> Draw:
    low, high = (bound if bound is not None and math.isfinite(bound) else None for bound in bounds)
    return Draw(value.shape, value.dtype, low, high, regime)


def drawn(draws: Mapping[str, Given], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: draw.tensor(generator) for name, draw in draws.items()}


def narrowed(sequential: Graph, ranges: Ranges, high: int) -> Ranges:
    """The ranges, with integers that have none in `[0, high)`: for programs that index with them in ways not understood."""
    free = [name for name, value in sequential.inputs.items() if _is_whole(value) and ranges.get(name) in (None, (None, None))]
    return {**ranges, **dict.fromkeys(free, (0, high))}


def has_free_integers(sequential: Graph, ranges: Ranges) -> bool:
    return any(_is_whole(value) and ranges.get(name) in (None, (None, None)) for name, value in sequential.inputs.items())


def _is_whole(value: Value) -> bool:
    kind = DTYPES[value.dtype]
    return not (kind.is_floating_point or kind.is_complex or kind == torch.bool)


def regimes(trials: int) -> Sequence[Regime]:
    return [REGIMES[number % len(REGIMES)] for number in range(trials)]
