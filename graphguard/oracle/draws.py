"""How each input is drawn, as a tensor and as the line of a script that draws the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from graphguard.aten.operators import DTYPES
from graphguard.graph.ir import Graph, Value
from graphguard.oracle.mixture import OF_REALS, OF_TRUTH, OF_WHOLE, PEAKS, mixed, mixed_truth, mixed_whole

Bound = float | int | None
Ranges = Mapping[str, tuple[Bound, Bound]]
_UNBOUNDED = 8  # integers that nothing bounds are drawn from as far below zero and above it
_FAR = 1000  # the same, in a mixture, where their dtype has more
_FEW = (-2.0, -1.0, -0.5, 0.0, 1.0, 2.0)  # numbers among which there are ties


class Regime(NamedTuple):
    """What inputs look like. scale, positive: of floats without bounds. Where those are positive, whole numbers are large.

    mixture: None for random numbers; else which of the mixtures of zeros, ties and ends of ranges. The first has some of each
    in every input, the others one of them for each.
    """

    scale: float
    positive: bool = False
    mixture: int | None = None


FIRST_PEAK = 10  # the number of the first mixture with a peak
REGIMES = (Regime(1.0), Regime(1.0, mixture=0), Regime(1.0, positive=True), Regime(0.25), Regime(3.0))


class Given(Protocol):
    """One input: its numbers, and the lines of a script that give them a name."""

    def tensor(self, generator: torch.Generator) -> torch.Tensor: ...
    def lines(self, name: str) -> list[str]: ...


@dataclass(frozen=True)
class Draw:
    """One input. `low <= v < high`; None is no bound. kind: of a mixture. special: numbers at which the programs may turn."""

    shape: tuple[int, ...]
    dtype: str
    low: Bound
    high: Bound
    regime: Regime
    kind: str | None = None
    special: tuple[float, ...] = ()

    def tensor(self, generator: torch.Generator) -> torch.Tensor:
        kind = DTYPES[self.dtype]
        if self.kind is not None:
            return self._mixed(self.kind, generator)
        if kind == torch.bool:
            return torch.rand(self.shape, generator=generator, dtype=torch.float64) < 0.5
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
        if self.kind is not None:
            return self._mixed_code(self.kind)
        if kind == torch.bool:
            return f"torch.rand({self.shape}, generator=g, dtype=torch.float64) < 0.5"
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

    # ------------------------------------------------------------------ mixtures
    def _mixed(self, chosen: str, generator: torch.Generator) -> torch.Tensor:
        kind = DTYPES[self.dtype]
        if kind == torch.bool:
            return mixed_truth(self.shape, chosen, generator=generator)
        if not (kind.is_floating_point or kind.is_complex):
            return mixed_whole(self.shape, *self._whole_bounds(), self._few_whole(), chosen, generator=generator).to(kind)
        numbers = mixed(self.shape, self.low, self.high, self._few(), chosen, generator=generator)
        if kind.is_complex:
            return torch.complex(numbers, mixed(self.shape, None, None, self._few(), "rows", generator=generator))
        return numbers.abs().clamp(min=0.01) if self._is_positive() else numbers

    def _mixed_code(self, chosen: str) -> str:
        kind = DTYPES[self.dtype]
        if kind == torch.bool:
            return f"mixed_truth({self.shape}, {chosen!r}, generator=g)"
        if not (kind.is_floating_point or kind.is_complex):
            low, high = self._whole_bounds()
            return f"mixed_whole({self.shape}, {low}, {high}, {self._few_whole()}, {chosen!r}, generator=g).to({kind})"
        numbers = f"mixed({self.shape}, {self.low!r}, {self.high!r}, {self._few()}, {chosen!r}, generator=g)"
        if kind.is_complex:
            return f"torch.complex({numbers}, mixed({self.shape}, None, None, {self._few()}, 'rows', generator=g))"
        return f"{numbers}.abs().clamp(min=0.01)" if self._is_positive() else numbers

    def _is_positive(self) -> bool:
        return self.regime.positive and self.low is None and self.high is None

    def _few(self) -> tuple[float, ...]:
        return (*_FEW, *self.special)

    def _few_whole(self) -> tuple[int, ...]:
        """Zero and one, if they are allowed, and the numbers at which the programs may turn."""
        low, high = self._whole_bounds()
        special = [int(each) for each in self.special if float(each).is_integer() and self._has(int(each))]
        return (*(each for each in (0, 1) if low <= each < high), *special) or (low,)

    def _has(self, number: int) -> bool:
        kind = torch.iinfo(DTYPES[self.dtype])
        return bool(kind.min <= number <= kind.max)

    def _whole_bounds(self) -> tuple[int, int]:
        low = None if self.low is None else math.ceil(self.low)
        high = None if self.high is None else math.ceil(self.high)
        kind = torch.iinfo(DTYPES[self.dtype])
        large = self.kind is None and self.regime.positive
        far = _FAR if self.kind is not None or large else _UNBOUNDED
        if low is None and high is None:
            low, high = max(-far, kind.min), min(far, kind.max + 1)
        elif low is None:
            assert high is not None
            low = max(high - 2 * far, kind.min)
        elif high is None:
            high = min(low + 2 * far, kind.max + 1)
        high = max(high, low + 1)
        return (high - max(1, (high - low) // 4) if large else low), high


def draws_of(sequential: Graph, ranges: Ranges, regime: Regime, special: Mapping[str, tuple[float, ...]]) -> dict[str, Draw]:
    """How each sequential input is drawn, in the order of the inputs."""
    return {
        name: _draw(value, ranges.get(name, (None, None)), regime, place, special.get(name, ()))
        for place, (name, value) in enumerate(sequential.inputs.items())
    }


def _draw(value: Value, bounds: tuple[Bound, Bound], regime: Regime, place: int, special: tuple[float, ...]) -> Draw:
    low, high = (bound if bound is not None and math.isfinite(bound) else None for bound in bounds)
    kind = None if regime.mixture is None else _kind(value, regime.mixture, place)
    return Draw(value.shape, value.dtype, low, high, regime, kind, special if kind is not None else ())


def _kind(value: Value, mixture: int, place: int) -> str:
    """The first mixture has some of each; in the others the inputs take turns. In the last ones all floats have a peak."""
    if mixture == 0:
        return "rows"
    if mixture >= FIRST_PEAK and not (value.dtype == "bool" or _is_whole(value)):
        return PEAKS[mixture - FIRST_PEAK]
    kinds = OF_TRUTH if value.dtype == "bool" else OF_WHOLE if _is_whole(value) else OF_REALS
    return kinds[(mixture + place) % len(kinds)]


@dataclass(frozen=True, eq=False)
class Numbers:
    """One input that is written out. Smaller ones are made of it as of one that is drawn."""

    dtype: str
    numbers: torch.Tensor
    low: Bound = None
    high: Bound = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.numbers.shape)

    def tensor(self, generator: torch.Generator) -> torch.Tensor:
        return self.numbers

    def lines(self, name: str) -> list[str]:
        return [f"{name} = {self.code()}"]

    def code(self) -> str:
        return f"torch.tensor({self.numbers.tolist()!r}, dtype={self.numbers.dtype}).reshape({self.shape})"


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
    """Random numbers first, then a mixture, and so on; no mixture is the same as another."""
    every = [REGIMES[number % len(REGIMES)] for number in range(trials)]
    rounds = [number // len(REGIMES) for number in range(trials)]
    return [
        regime if regime.mixture is None else regime._replace(mixture=number)
        for regime, number in zip(every, rounds, strict=True)
    ]
