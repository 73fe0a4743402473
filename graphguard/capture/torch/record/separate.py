"""Operators whose written memory is shared with another argument: what they give depends on the kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from graphguard.aten.operators import Operator
from graphguard.capture.torch.world.races import overlap, span
from graphguard.errors import CaptureError

if TYPE_CHECKING:
    from graphguard.capture.torch.record.aliasing import Cell


_MOST_ELEMENTS = 1 << 20  # that are compared one by one; beyond, a window of unusual strides is taken to overlap


def require_separate(info: Operator, arguments: list[Cell], written: list[Cell]) -> None:
    """A node reads all of its operands before it writes. Where memory that it writes overlaps another operand, torch may
    read what it has just written, which a node cannot say."""
    for cell in written:
        if overlaps_itself(cell.geometry[1], cell.geometry[2]):
            raise CaptureError(
                f"{info.name} writes to a tensor several of whose elements are one place in memory, so that its result depends "
                "on the order in which they are visited; write to a copy (`.clone()`)"
            )
    if len({cell.storage for cell in arguments}) == len(arguments):
        return
    for storage in {cell.storage for cell in written}:
        targets = {cell for cell in written if cell.storage is storage}
        windows = sorted((cell for cell in arguments if cell.storage is storage), key=lambda cell: span(cell)[0])
        for index, first in enumerate(windows):
            for second in windows[index + 1 :]:
                if span(second)[0] > span(first)[1]:
                    break
                if first is second and info.elementwise and written.count(first) == 1:
                    continue  # x.mul_(x): each element is read before it is written
                if (first in targets or second in targets) and overlap(first, second):
                    raise CaptureError(
                        f"{info.name} writes to memory that another of its arguments shares, so that its result depends on the "
                        "order in which elements are visited; pass a copy (`.clone()`)"
                    )


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of a strided window are the same place."""
    if 0 in shape:
        return False
    dims = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    if math.prod(shape) > _MOST_ELEMENTS:
        return True
    places = np.zeros(1, dtype=np.int64)
    for stride, size in dims:
        places = np.add.outer(places, stride * np.arange(size)).reshape(-1)
    return len(np.unique(places)) < len(places)
