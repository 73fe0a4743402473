"""The ranks that one run of a program stands for, its lanes.

Whoever asks for something on which the lanes do not agree splits them: the run goes on with those that have the first one's
answer, and the others are left to runs of their own.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

import graphguard

Numbers = np.ndarray[Any, np.dtype[Any]]
_OURS = (str(Path(graphguard.__file__).parent), str(Path(torch.__file__).parent), "<")


class NotByClasses(BaseException):
    """Something that is not modelled for many ranks at once. Not an Exception, so that no program catches it."""


@dataclass
class Split:
    """Ranks that a run left behind: where, over what, and in which sets of equal answers."""

    where: str
    what: str
    ranks: list[Numbers]


@dataclass
class Run:
    """`ranks` are all lanes; `active` are those that the run still stands for, the witness first."""

    ranks: Numbers
    active: Numbers = field(init=False)
    splits: list[Split] = field(default_factory=list)
    sealed: bool = False  # whether the program has ended: no lane may leave any more

    def __post_init__(self) -> None:
        self.active = np.arange(len(self.ranks))

    @property
    def witness(self) -> int:
        """The rank that torch's own code runs as."""
        return int(self.ranks[self.active[0]])

    def over_lanes(self, numbers: Any) -> Numbers:
        return np.broadcast_to(np.asarray(numbers), self.ranks.shape)

    def agree(self, numbers: Numbers) -> bool:
        if numbers.ndim == 0:
            return True
        held = numbers[self.active]
        return bool((held == held[0]).all())

    def of_witness(self, numbers: Numbers) -> int:
        return int(numbers) if numbers.ndim == 0 else int(numbers[self.active[0]])

    def forced(self, numbers: Numbers, what: str) -> int:
        """The number that all lanes have. Lanes that have another one leave this run."""
        if not self.agree(numbers):
            if self.sealed:
                raise NotByClasses(f"{what} is asked for after the program has ended")
            held = numbers[self.active]
            kept = held == held[0]
            others = [self.ranks[self.active[held == other]] for other in _distinct(held[~kept])]
            self.splits.append(Split(_place(), what, others))
            self.active = self.active[kept]
        return self.of_witness(numbers)


def _distinct(numbers: Numbers) -> Numbers:
    ordered = np.sort(numbers)  # np.unique makes sets, whose order a capture is not to ask for
    firsts = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    return np.asarray(ordered[firsts])


class _Current:
    """Of this process, which runs one class and ends."""

    run: Run | None = None


def begin(ranks: Numbers) -> Run:
    _Current.run = Run(ranks)
    return _Current.run


def current() -> Run:
    assert _Current.run is not None, "no run for many ranks has begun"
    return _Current.run


def _place() -> str:
    """The nearest line that is neither ours nor torch's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
