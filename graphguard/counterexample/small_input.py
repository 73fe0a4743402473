"""An input of a counterexample that was made small: plain numbers inside of a window, and nothing to look at elsewhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from graphguard.aten.custom import WIDE
from graphguard.aten.operators import DTYPES
from graphguard.oracle.draws import Draw, Numbers

Window = tuple[tuple[int, int], ...]  # by dim, from and to
RANDOM, WHOLE, POSITIVE, ONE, ZERO = "random", "whole", "positive", "one", "zero"
_LISTED = 6  # numbers that are written one by one
_BETWEEN = {WHOLE: (-3, 4), POSITIVE: (1, 4)}


@dataclass(frozen=True)
class Shrunk:
    """kind: which numbers are inside of the window. seed: of those that are random."""

    draw: Draw | Numbers
    seed: int
    kind: str
    window: Window

    @staticmethod
    def of(draw: Draw | Numbers, seed: int) -> Shrunk:
        """All of an input, as random as it was."""
        return Shrunk(draw, seed, RANDOM, tuple((0, size) for size in draw.shape))

    def with_kind(self, kind: str) -> Shrunk | None:
        """The same window with other numbers; None where the input's bounds or its dtype do not have them."""
        made = replace(self, kind=kind)
        return made if kind == RANDOM or made._are_allowed() else None

    def within(self, dim: int, low: int, high: int) -> Shrunk:
        """Only a part of the window, along one dim."""
        return replace(self, window=(*self.window[:dim], (low, high), *self.window[dim + 1 :]))

    # ------------------------------------------------------------------ numbers
    @property
    def dtype(self) -> torch.dtype:
        kind = DTYPES[self.draw.dtype]
        return WIDE.get(kind, kind)

    @property
    def is_real(self) -> bool:
        return bool(self.dtype.is_floating_point)

    @property
    def rest(self) -> float | int:
        """What is outside of the window."""
        if self._is_allowed(0):
            return 0
        bound = self.draw.low if self.draw.low is not None else self.draw.high
        assert bound is not None
        if self.draw.low is not None:
            return bound if self.is_real else math.ceil(bound)
        return bound - 1 if self.is_real else math.ceil(bound) - 1

    def _is_allowed(self, number: float) -> bool:
        low, high = self.draw.low, self.draw.high
        return (low is None or low <= number) and (high is None or number < high)

    def _are_allowed(self) -> bool:
        if self.kind == ZERO:
            return True
        if self.kind == ONE:
            return self.dtype != torch.bool and self._is_allowed(1)
        low, high = _BETWEEN[self.kind]
        return self.is_real and self._is_allowed(low) and self._is_allowed(high - 1)

    @property
    def is_plain(self) -> bool:
        """Whether it is one number everywhere."""
        return self.kind == ZERO or not all(low < high for low, high in self.window)

    @property
    def is_all(self) -> bool:
        return all(span == (0, size) for span, size in zip(self.window, self.draw.shape, strict=True))

    @property
    def count(self) -> int:
        return math.prod(high - low for low, high in self.window)

    @cached_property
    def numbers(self) -> torch.Tensor:
        whole = torch.full(self.draw.shape, self.rest, dtype=self.dtype)
        if not self.is_plain:
            place = tuple(slice(low, high) for low, high in self.window)
            whole[place] = self._filling()[place]
        return whole

    def _filling(self) -> torch.Tensor:
        if self.kind == ONE:
            return torch.ones(self.draw.shape, dtype=self.dtype)
        generator = torch.Generator().manual_seed(self.seed)
        if self.kind == RANDOM:
            return self.draw.tensor(generator).to(self.dtype)
        return torch.randint(*_BETWEEN[self.kind], self.draw.shape, generator=generator).to(self.dtype)

    def tensor(self, generator: torch.Generator) -> torch.Tensor:
        """As `Draw` has it. Its random numbers are its own, so that others do not change with it."""
        return self.numbers

    # ------------------------------------------------------------------ words
    @property
    def is_listed(self) -> bool:
        """Whether the numbers inside are so few that each is written."""
        return not self.is_plain and (self.kind != RANDOM or not self._has_fractions) and self.count <= _LISTED

    @property
    def _has_fractions(self) -> bool:
        return bool(self.dtype.is_floating_point or self.dtype.is_complex)

    def _listed(self) -> list[tuple[tuple[int, ...], int]]:
        places = itertools.product(*(range(low, high) for low, high in self.window))
        numbers = [(place, int(self.numbers[place].real)) for place in places]
        return [(place, number) for place, number in numbers if number != self.rest]

    def texts(self, name: str) -> list[str]:
        """For people: what is inside of the window."""
        if self.is_plain:
            return []
        if self.is_listed:
            return [f"{_indexed(name, map(str, place))} = {number}" for place, number in self._listed()]
        where = name if self.is_all else _indexed(name, self._spans())
        if self.kind == ONE:
            return [f"{where} = 1 everywhere" if self.is_all else f"{where} = 1"]
        if self.kind == RANDOM:
            return [f"{where} {'as drawn' if isinstance(self.draw, Numbers) else 'random'}"]
        return [f"{where} small whole numbers"]

    def lines(self, name: str) -> list[str]:
        """The lines of a script that make it."""
        made = f"{name} = torch.full({self.draw.shape}, {self.rest!r}, dtype={self.dtype})"
        if self.is_plain:
            return [made]
        if self.is_listed:
            target = [f"{name}[{', '.join(map(str, place)) or '...'}] = {number}" for place, number in self._listed()]
            return [made, *target]
        code = self._code()
        if self.is_all:
            return [f"{name} = {code}"]
        spans = ", ".join(f"{low}:{high}" for low, high in self.window)
        return [made, f"{name}[{spans}] = ({code})[{spans}]"]

    def _code(self) -> str:
        if self.kind == ONE:
            return f"torch.ones({self.draw.shape}, dtype={self.dtype})"
        generator = f"torch.Generator().manual_seed({self.seed})"
        if self.kind == RANDOM:
            return f"({self.draw.code()}).to({self.dtype})".replace("generator=g", f"generator={generator}")
        low, high = _BETWEEN[self.kind]
        return f"torch.randint({low}, {high}, {self.draw.shape}, generator={generator}).to({self.dtype})"

    def _spans(self) -> list[str]:
        return [
            ":" if (low, high) == (0, size) else str(low) if high == low + 1 else f"{low}:{high}"
            for (low, high), size in zip(self.window, self.draw.shape, strict=True)
        ]


def _indexed(name: str, places: Iterable[str]) -> str:
    inside = ", ".join(places)
    return f"{name}[{inside}]" if inside else name
