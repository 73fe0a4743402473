"""Operators whose written memory is shared with another argument: what they give depends on the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphguard.aten.operators import Operator
from graphguard.capture.races import overlap, span
from graphguard.errors import CaptureError

if TYPE_CHECKING:
    from graphguard.capture.aliasing import Cell


def require_separate(info: Operator, arguments: list[Cell], written: list[Cell]) -> None:
    """A node reads all of its operands before it writes. Where memory that it writes overlaps another operand, torch may
    read what it has just written, which a node cannot say."""
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
