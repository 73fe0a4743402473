"""Makes a counterexample small: as many inputs as can be are zero, then ones in a narrow window, then small whole numbers.

Shapes stay, as they are part of the captured programs. The search is the same each time: its length is bounded by how many
runs may be made, and not by a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from graphguard.counterexample.small_input import ONE, POSITIVE, RANDOM, WHOLE, ZERO, Shrunk
from graphguard.oracle.difference import Element
from graphguard.oracle.draws import Draw, Given, Numbers
from graphguard.oracle.trial import Trial

MOST_RUNS = 40
_DISTINCT = 1e-3  # how far apart two numbers are, relative to the larger, that show a difference and not rounding
_NOISE = 1e-5
Inputs = dict[str, Shrunk]


class Difference(NamedTuple):
    """A number that differs in a trial, and how far from it still counts as equal."""

    trial: Trial
    element: Element
    allowed: float

    @property
    def size(self) -> float:
        return abs(self.element.expected - self.element.actual)

    def is_distinct(self) -> bool:
        largest = max(abs(self.element.expected), abs(self.element.actual))
        return math.isfinite(self.size) and self.size >= _DISTINCT * max(largest, _DISTINCT)


Look = Callable[[Mapping[str, Given]], Difference | None]  # runs the programs; None if they agree
Sure = Callable[[Difference], bool]  # whether it is more than rounding


class Noisy(NamedTuple):
    """A small input, moved a little: what differs only where numbers are equal by chance does not survive it. zeros_too: or
    only numbers that are not zero."""

    shrunk: Shrunk
    zeros_too: bool = True

    def tensor(self, generator: torch.Generator) -> torch.Tensor:
        numbers = self.shrunk.numbers
        if not self.shrunk.is_real:
            return numbers
        noise = _NOISE * torch.rand(numbers.shape, generator=generator, dtype=numbers.dtype)
        return numbers + noise if self.zeros_too else numbers * (1 + noise)

    def lines(self, name: str) -> list[str]:
        return self.shrunk.lines(name)


def shrunk(
    found: Difference, look: Look, sure: Sure, names: Container[str], runs: int, on_path: bool = False
) -> Difference | None:
    """A smaller one, of the inputs that are needed; None if the search finds none.

    on_path: what is zero stays so, as it may be what decides.

    What random numbers show must not rest on numbers that are equal by chance. What needs a tie or a zero may.
    """
    if not found.is_distinct() or runs < 3:
        return None
    search = _Search(found, look, names, min(runs, MOST_RUNS) - 1)
    smaller = search.run()
    if smaller is None:
        return None
    if found.trial.regime.mixture is not None:
        return smaller if sure(smaller) else None
    again = look({name: Noisy(each, not on_path) for name, each in search.inputs.items()})
    return smaller if again is not None and _is_near(smaller, again.trial) else None


def _is_near(found: Difference, moved: Trial) -> bool:
    """Whether both numbers are hardly others after inputs were moved a little."""
    element = found.element
    ranks = moved.values(element.path)
    pairs = [] if element.reduced else [(element.actual, ranks[element.rank], element.index)]
    if element.within is not None:
        pairs.append((element.expected, moved.references[element.path].whole, element.within))
    return all(abs(number - tensor[place].item()) <= found.size / 4 for number, tensor, place in pairs)


class _Search:
    def __init__(self, found: Difference, look: Look, names: Container[str], runs: int):
        self.look, self.runs = look, runs
        seed = found.trial.seed
        self.inputs: Inputs = {
            name: Shrunk.of(draw, seed + n)
            for n, (name, draw) in enumerate(found.trial.draws.items())
            if isinstance(draw, Draw | Numbers) and name in names
        }
        self.best: Difference | None = None

    def run(self) -> Difference | None:
        if not any(self._try(self._all(kind)) for kind in (WHOLE, POSITIVE, RANDOM)):
            return None
        self._zeros(list(self.inputs))
        self._corner()
        for name in self._left():
            self._ones(name)
            self._narrow(name)
            self._ones(name)
        return self.best

    def _try(self, changed: Mapping[str, Shrunk | None]) -> bool:
        """Whether the programs still differ with some inputs changed; if so, the change stays."""
        chosen = {name: each for name, each in changed.items() if each is not None and each != self.inputs[name]}
        if self.runs <= 0 or (not chosen and self.best is not None):
            return False
        self.runs -= 1
        inputs = {**self.inputs, **chosen}
        found = self.look(inputs)
        if found is None or not found.is_distinct():
            return False
        self.inputs, self.best = inputs, found
        return True

    def _all(self, kind: str) -> Inputs:
        return {name: each.with_kind(kind) or each for name, each in self.inputs.items()}

    def _left(self) -> list[str]:
        return [name for name, each in self.inputs.items() if not each.is_plain]

    def _zeros(self, names: Sequence[str]) -> None:
        """Whole inputs become zero, many at once where that will do."""
        if self._try({name: self.inputs[name].with_kind(ZERO) for name in names}) or len(names) < 2:
            return
        half = len(names) // 2
        self._zeros(names[:half])
        self._zeros(names[half:])

    def _ones(self, name: str) -> None:
        each = self.inputs[name]
        if each.kind in (RANDOM, WHOLE, POSITIVE):
            self._try({name: each.with_kind(ONE)})

    def _corner(self) -> None:
        """The guess that is right most often: the first number of each input is enough."""
        self._try({name: _first(self.inputs[name].with_kind(ONE) or self.inputs[name]) for name in self._left()})

    def _narrow(self, name: str) -> None:
        for dim in range(len(self.inputs[name].window)):
            while any(self._try({name: part}) for part in _parts(self.inputs[name], dim)):
                pass


def _first(each: Shrunk) -> Shrunk:
    for dim, (low, high) in enumerate(each.window):
        each = each.within(dim, low, min(low + 1, high))
    return each


def _parts(each: Shrunk, dim: int) -> Iterator[Shrunk]:
    """Smaller windows along a dim: the first position, and each half."""
    low, high = each.window[dim]
    middle = (low + high) // 2
    if high - low > 1:
        yield each.within(dim, low, low + 1)
        if high - low > 2:
            yield each.within(dim, low, middle)
        yield each.within(dim, middle, high)
