"""Inputs on which the two programs differ, as executed: plain data, and a script that shows the difference with torch alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphguard.errors import UsageError
from graphguard.graph.ir import Source
from graphguard.graph.paths import folded

Number = bool | int | float | complex
MOST_TOLD = 12  # inputs, on a screen


@dataclass(frozen=True)
class Element:
    """One number of an output on a rank: what the sequential program has there, and what the rank has.

    index: the place in the rank's own tensor. within: the place in the sequential output, where the rank should hold a tile.
    shape: the rank's tensor, where it has no such place, and `actual` is nan, or should not, and `expected` is.
    reduced: "sum", "avg", "max" or "min" if `actual` is that of the ranks' numbers, because the output is expected to be
        Partial; None if it is the rank's own.
    """

    path: str
    rank: int
    index: tuple[int, ...]
    expected: Number
    actual: Number
    within: tuple[int, ...] | None = None
    reduced: str | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Divergence:
    """The first tensor on the way to the output whose values part.

    distributed, ranks: the operation of the ranks that first makes what the sequential program does not have.
    operator, sequential: the operation there that reads the same.
    expected, actual: one number of each of the two tensors, at the same place; None where their shapes do not fit.
    words: what is wrong with the result, where it can be told.
    beside, callers: other lines that may be the fault: where what it reads was moved last, and which called for it.
    at_the_end: the ranks' numbers are all known to the sequential program; what is wrong is who holds which.
    """

    operator: str
    sequential: Source | None
    distributed: Source | None
    ranks: tuple[int, ...]
    expected: float | None
    actual: float | None
    backward: bool = False
    words: str | None = None
    beside: Source | None = None
    callers: tuple[Source, ...] = ()
    at_the_end: bool = False


@dataclass(frozen=True)
class Counterexample:
    """seed: of the inputs. shapes: of the sequential inputs. script: what `save` writes.

    inputs: what the inputs are, where small ones do; else they are random.
    raises: where the ranks would raise, and what, if the number is nan because of that.
    """

    seed: int
    shapes: dict[str, tuple[int, ...]]
    element: Element
    parting: Divergence | None
    script: str
    inputs: tuple[str, ...] = ()
    raises: str | None = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a script that needs torch alone, runs both programs on the inputs, and ends in an assert that fails."""
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(self.script)
        except OSError as error:
            raise UsageError(f"the counterexample cannot be written to {os.fspath(path)!r}: {error.strerror}") from None

    def to_plain(self) -> dict[str, Any]:
        """As JSON has it; the script is left to `save`."""
        element, parting = self.element, self.parting
        plain: dict[str, Any] = {
            "seed": self.seed,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "inputs": list(self.inputs),
            "raises": self.raises,
            "element": {
                "path": element.path,
                "rank": element.rank,
                "index": list(element.index),
                "within": None if element.within is None else list(element.within),
                "reduced": element.reduced,
                "shape": None if element.shape is None else list(element.shape),
                "expected": _plain(element.expected),
                "actual": _plain(element.actual),
            },
            "parting": None,
        }
        if parting is not None:
            plain["parting"] = {
                "operator": parting.operator,
                "sequential": None if parting.sequential is None else str(parting.sequential),
                "distributed": None if parting.distributed is None else str(parting.distributed),
                "ranks": list(parting.ranks),
                "expected": _plain(parting.expected),
                "actual": _plain(parting.actual),
            }
        return plain

    def lines(self) -> list[str]:
        """For people."""
        element = self.element
        place = ", ".join(map(str, element.index))
        reduced = "" if element.reduced is None else f" ({_REDUCED[element.reduced]} over the ranks)"
        name = f"{element.path}[{place}]" if place else element.path
        within = element.within if element.within not in (None, element.index) else ()
        actual = f"{name} is {_shown(element.actual)}{reduced}"
        expected = f"the sequential program has {_shown(element.expected)}{f' at {list(within)}' if within else ''}"
        if element.shape is not None:
            actual, place = f"{element.path} has the shape {list(element.shape)}", f" at {list(element.index)}"
            expected = f"nothing is expected{place}" if element.expected != element.expected else f"{expected}{place}"
        lines = [f"counterexample: on rank {element.rank}, {actual}, where {expected}", *self._input_lines()]
        lines += [] if self.raises is None else [f"  raises       {self.raises}"]
        return lines + ([] if self.parting is None else _parting_lines(self.parting))

    def _shapes_in_words(self) -> list[str]:
        """One by one, or those of one shape together, if they are many."""
        if len(self.shapes) <= MOST_TOLD:
            return [f"{name} {list(shape)}" for name, shape in self.shapes.items()]
        alike: dict[tuple[int, ...], list[str]] = {}
        for name, shape in self.shapes.items():
            alike.setdefault(shape, []).append(name)
        return [f"{pattern} {list(shape)}" for shape, names in alike.items() for pattern in folded(names)]

    def _input_lines(self) -> list[str]:
        shapes = _told(self._shapes_in_words())
        if not self.inputs:
            return [f"  inputs       seed {self.seed}: {shapes}"]
        *inside, elsewhere = self.inputs
        inside = _folded(inside)
        told = f"{_told(inside)}, {elsewhere}" if inside else elsewhere
        return [f"  inputs       {told}", f"  shapes       {shapes}"]


_FILLED = (" small whole numbers", " random")


def _folded(inputs: Sequence[str]) -> list[str]:
    """Inputs that are filled alike as one: `params.h.*.{up,down}.weight small whole numbers`."""
    filled: dict[str, list[str]] = {how: [] for how in _FILLED}
    others = []
    for text in inputs:
        how = next((how for how in _FILLED if text.endswith(how) and "[" not in text), None)
        if how is None:
            others.append(text)
        else:
            filled[how].append(text.removesuffix(how))
    return [*(f"{pattern}{how}" for how, names in filled.items() for pattern in folded(names)), *others]


def _told(texts: Sequence[str]) -> str:
    """As many as fit on a screen."""
    left = len(texts) - MOST_TOLD
    return ", ".join(texts if left <= 0 else (*texts[: MOST_TOLD - 1], f"and {left + 1} more"))


_REDUCED = {"sum": "sum", "avg": "mean", "max": "maximum", "min": "minimum"}


def _parting_lines(parting: Divergence) -> list[str]:
    ranks = f"on rank{'' if len(parting.ranks) == 1 else 's'} {', '.join(map(str, parting.ranks))}"
    sides = [
        _side("in the sequential program", parting.expected, parting.sequential),
        _side(ranks, parting.actual, parting.distributed),
    ]
    return [f"  first apart  {parting.operator}: {', '.join(sides)}"]


def _side(who: str, number: float | None, source: Source | None) -> str:
    where = "" if source is None else f" at {source.told}"
    return f"{who}{where}" if number is None else f"{_shown(number)} {who}{where}"


def _shown(number: Number) -> str:
    return f"{number:.7g}" if isinstance(number, float) else str(number)


def _plain(number: Number | None) -> Any:
    """What JSON can hold: it has no complex numbers, and no nan."""
    if isinstance(number, complex):
        return [_plain(number.real), _plain(number.imag)]
    if isinstance(number, float) and (number != number or number in (float("inf"), float("-inf"))):
        return str(number)
    return number
