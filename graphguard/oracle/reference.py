"""A sequential tensor as executed, and how near another one must come to count as equal.

Two programs that are equal over the reals differ in float64 by rounding. How much is seen from the sequential program itself:
it runs a second time on inputs that are moved by a trifle. Where that does not explain a difference, `again.py` looks closer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

NUDGE = 1e-10  # by which inputs are moved, relative to each
_RELATIVE = 1e-7  # to an element, and to a typical one
_ROUNDED = 1e-4  # the same, where operators of the user's own round to fewer bits
_OF_LARGEST = 1e-13  # rounding of large terms that cancel
_OF_INPUTS = 1e-12  # to the largest input: what is left where all cancels
_OF_MOVED = 1e3  # times the distance that the nudge makes: inputs nudged by 1e-10 allow for 1e-7
_OF_MEANS = 1e-6  # from a whole number
Move = Callable[[torch.Tensor], torch.Tensor]
Slack: TypeAlias = float | torch.Tensor


@dataclass(frozen=True)
class Reference:
    """whole: the value. tolerance: by element. claimed: where the sequential program is defined and not decided by rounding.

    lenient: a value that is not finite is not held against the ranks, because their numbers overflow.
    """

    whole: torch.Tensor
    tolerance: torch.Tensor
    claimed: torch.Tensor
    lenient: bool = False

    def at(self, move: Move) -> Reference:
        """A part of it, or a view: what `move` makes of each of its tensors."""
        return Reference(move(self.whole), move(self.tolerance), move(self.claimed), self.lenient)

    def doubted(self, other: torch.Tensor, times: float) -> Reference:
        """After a run that gave other numbers for the same inputs: as far as these are apart, nothing is claimed."""
        if not is_real(self.whole):
            return Reference(self.whole, self.tolerance, self.claimed & (other == self.whole), self.lenient)
        distance = (other - self.whole).abs().to(torch.float64)
        known = torch.isfinite(distance)
        claimed = self.claimed & (known | (other.isnan() & self.whole.isnan()))
        return Reference(self.whole, self.tolerance + times * torch.where(known, distance, 0.0), claimed, self.lenient)

    def excess(self, value: torch.Tensor, slack: Slack = 0.0) -> torch.Tensor:
        """By element, how many times the tolerance a value of the same shape is away; 0 where nothing is claimed.

        Whole numbers and truth values are equal or not: there is no rounding that would have to be outweighed.
        """
        excess = self._of_reals(value, slack) if is_real(self.whole) else self._of_whole(value, slack)
        return torch.where(self.claimed, excess, 0.0)

    def _of_reals(self, value: torch.Tensor, slack: Slack) -> torch.Tensor:
        distance = (value.to(_wide(value)) - self.whole.to(_wide(self.whole))).abs()
        allowed = self.tolerance + slack
        broken = ~torch.isfinite(distance)
        excess = torch.where(broken, 0.0 if self.lenient else torch.inf, distance / allowed)
        return torch.where(torch.isinf(allowed), 0.0, excess)

    def _of_whole(self, value: torch.Tensor, slack: Slack) -> torch.Tensor:
        distance = (value.to(_wide(value)) - self.whole.to(torch.float64)).abs()
        if is_real(value):  # a mean of whole numbers
            return torch.where(distance <= _OF_MEANS + slack, 0.0, torch.inf)
        return torch.where((value == self.whole) | ((distance <= slack) & (distance > 0)), 0.0, torch.inf)

    def fits(self, value: torch.Tensor, slack: Slack = 0.0) -> bool:
        return value.shape == self.whole.shape and bool((self.excess(value, slack) <= 1).all())


def reference(whole: torch.Tensor, moved: torch.Tensor, largest_input: float, rounds: bool = False) -> Reference:
    """From a tensor, and the same after the inputs were nudged. `rounds` if it was not computed in 64 bits."""
    if not is_real(whole):
        return Reference(whole, torch.full(whole.shape, 0.5, dtype=torch.float64), whole == moved)
    size = whole.abs().to(torch.float64)
    finite = torch.isfinite(size)
    distance = (moved - whole).abs().to(torch.float64)
    distance = torch.where(torch.isfinite(distance), distance, 0.0)
    rounded = size[finite & (distance > 0)]  # what inputs do not move, such as masks, says nothing of rounding
    if not rounded.numel():
        rounded = size[finite & (size > 0)]
    typical = float(rounded.median()) if rounded.numel() else 0.0
    largest = float(rounded.max()) if rounded.numel() else 0.0
    usual = float(distance[finite].median()) if bool(finite.any()) else 0.0
    tolerance = (_ROUNDED if rounds else _RELATIVE) * (torch.where(finite, size, 0.0) + typical) + _OF_MOVED * (
        distance + 10 * usual
    )
    tolerance = tolerance + (_OF_LARGEST * largest + _OF_INPUTS * largest_input + torch.finfo(torch.float64).tiny)
    return Reference(whole, tolerance, finite)


def rounding_of(values: list[torch.Tensor]) -> float:
    """What summing these may add to the rounding."""
    real = [value for value in values if value.numel() and is_real(value)]
    sizes = [value.abs().to(torch.float64).nan_to_num(0.0, 0.0, 0.0) for value in real]
    return _OF_LARGEST * max((float(size.max()) for size in sizes), default=0.0)


def is_real(tensor: torch.Tensor) -> bool:
    """Whether it has numbers that rounding may move."""
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
