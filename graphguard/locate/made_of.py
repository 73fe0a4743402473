"""Which tensors of the sequential program a rank's tensor is made of, as its numbers show.

Numbers that come of random inputs are distinct, so a tensor is known by its elements: if all of them are among those of one
sequential tensor, it is that tensor, a tile of it, or its elements in another order, however the ranks cut and arrange it.
Numbers that say nothing (whole numbers, simple fractions, infinities) are passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from graphguard.graph.ir import Value

Numbers = NDArray[np.float64]
_MOST_LOOKED_UP = 512  # elements of a tensor
_MOST_OWNERS = 12  # that are tried for one tensor
_MIXED = 4  # telling numbers, at least, of a tensor that is put together from several
_NEAR, _NEAR_ZERO = 1e-9, 1e-11
_FRACTIONS = 2**10 * 3**2 * 5 * 7  # whole multiples of one part in so many are counts, shares of counts, masks


@dataclass(frozen=True)
class Origin:
    """owner: which sequential tensor it is, None for elements of several. whole: all of it, not a part. factor: a multiple.

    summed: the axes of the mesh over which it has to be summed first.
    """

    owner: int | None
    whole: bool
    factor: float = 1.0
    summed: tuple[int, ...] = ()


class Probe(NamedTuple):
    """The telling numbers of a tensor; how many elements it has in all, and whether all are finite."""

    numbers: Numbers
    elements: int
    finite: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Probe:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if not tensor.is_floating_point():
            return Probe(np.zeros(0), tensor.numel(), True)
        numbers: Numbers = tensor.detach().reshape(-1).to(torch.float64).numpy()
        finite = np.isfinite(numbers)
        with np.errstate(invalid="ignore"):
            grown = numbers * _FRACTIONS
            kept = numbers[finite & (np.abs(grown - np.rint(grown)) > 1e-7)]
        return Probe(kept, numbers.size, bool(finite.all()))


class MadeOf:
    """The elements of tensors of the sequential program, to be looked up."""

    def __init__(self, tensors: Iterable[tuple[Value | None, torch.Tensor]]):
        self.owners: list[Probe] = []
        self.owner_of: dict[Value | None, int] = {}  # tensors with the same elements are one owner
        seen: dict[tuple[int, int, bytes], int] = {}
        for value, tensor in tensors:
            sample = Probe.of(tensor)
            numbers = np.sort(sample.numbers)
            key = (numbers.size, sample.elements, numbers[:: max(1, numbers.size // 64)].tobytes())
            if numbers.size and key not in seen:
                seen[key] = len(self.owners)
                self.owners.append(sample._replace(numbers=numbers))
            if numbers.size:
                self.owner_of[value] = seen[key]
        every = np.concatenate([each.numbers for each in self.owners]) if self.owners else np.zeros(0)
        order = np.argsort(every, kind="stable")
        self._every = every[order]
        self._owner = np.repeat(np.arange(len(self.owners)), [each.numbers.size for each in self.owners])[order]

    def origin(self, sample: Probe, factors: Sequence[float] = (1.0,)) -> Origin | None:
        """What a tensor with telling numbers is, or a multiple of what: elements of one tensor, or else of several."""
        chosen = sample.numbers[:: -(-sample.numbers.size // _MOST_LOOKED_UP)]
        for factor in factors:
            found = self._origin(chosen / factor, sample)
            if found is not None:
                return replace(found, factor=factor)
        return None

    def _origin(self, chosen: Numbers, sample: Probe) -> Origin | None:
        slack = _NEAR * np.abs(chosen) + _NEAR_ZERO * float(np.abs(chosen).max())
        if not _are_in(chosen[:4], self._every, slack[:4]) or not _are_in(chosen, self._every, slack):
            return None
        low = int(np.searchsorted(self._every, chosen[0] - slack[0], "left"))
        high = int(np.searchsorted(self._every, chosen[0] + slack[0], "right"))
        size = sample.numbers.size
        candidates, masked = set(self._owner[low:high].tolist()), False
        for number in sorted(candidates, key=lambda each: (abs(self.owners[each].numbers.size - size), each))[:_MOST_OWNERS]:
            owner = self.owners[number]
            if _are_in(chosen, owner.numbers, slack):
                masked = masked or not _may_be(sample, owner)
                if _may_be(sample, owner):
                    return Origin(number, owner.elements == sample.elements)
        return Origin(None, False) if size >= _MIXED and sample.finite and not masked else None


def _may_be(sample: Probe, owner: Probe) -> bool:
    """Of a tensor with as many elements, as many must be telling: else something was masked in one of the two alone."""
    if sample.elements == owner.elements and sample.numbers.size != owner.numbers.size:
        return False
    return sample.finite or not owner.finite


def _are_in(numbers: Numbers, among: Numbers, slack: Numbers) -> bool:
    low = np.searchsorted(among, numbers - slack, "left")
    high = np.searchsorted(among, numbers + slack, "right")
    return bool((high > low).all())
