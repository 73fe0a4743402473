"""Buffers in flight: what asynchronous communication reads or fills must be left alone until its wait."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphguard.graph.findings import Finding
from graphguard.graph.ir import Graph, Source

if TYPE_CHECKING:
    from graphguard.capture.torch.record.aliasing import Cell, Geometry

_MOST_CHOICES = 10_000  # when comparing windows; beyond, they are taken to overlap


class Window(NamedTuple):
    """Part of a storage that work in flight reads (`fills` False) or fills."""

    work: int
    op: str
    cell: Cell
    fills: bool
    source: Source | None


class RaceDetector:
    def __init__(self, graph: Graph):
        self._graph = graph
        self._windows: dict[int, list[Window]] = {}
        self._reported: dict[tuple[Source, ...], Finding] = {}

    @property
    def active(self) -> bool:
        return bool(self._windows)

    def start(self, work: int, op: str, reads: Iterable[Cell], fills: Iterable[Cell], source: Source | None) -> None:
        windows = [Window(work, op, cell, False, source) for cell in reads]
        windows += [Window(work, op, cell, True, source) for cell in fills]
        for window in windows:
            window.cell.storage.in_flight.append(window)
        self._windows.setdefault(work, []).extend(windows)

    def wait(self, work: int) -> None:
        for window in self._windows.pop(work, ()):
            storage = window.cell.storage
            storage.in_flight.remove(window)
            if not storage.in_flight:
                storage.patches.clear()

    def read(self, cells: Iterable[Cell], source: Source | None) -> None:
        for cell in cells:
            for window in cell.storage.in_flight:
                if window.fills and overlap(cell, window.cell):
                    self._report("read", window, source)

    def write(self, cells: Iterable[Cell], source: Source | None) -> None:
        for cell in cells:
            for window in cell.storage.in_flight:
                if overlap(cell, window.cell):
                    self._report("written", window, source)

    def returned(self, cell: Cell) -> None:
        """The program hands out a tensor: nobody waits for it after that."""
        for window in cell.storage.in_flight:
            if window.fills and overlap(cell, window.cell):
                self._report("returned", window, None)

    def _report(self, verb: str, window: Window, source: Source | None) -> None:
        role = "fills" if window.fills else "reads"
        message = (
            f"a buffer that {window.op} ({window.source}) {role} in the background is {verb}"
            f"{f' at {source}' if source else ''} before its wait; call wait() first, or use another buffer"
        )
        sources = tuple(s for s in (source, window.source) if s is not None)
        finding = Finding("race", message, () if self._graph.rank is None else (self._graph.rank,), sources)
        earlier = self._reported.get(sources)
        if earlier is None:
            self._graph.findings.append(finding)
        elif verb == "written":  # one line that both reads and writes is one fault
            self._graph.findings[self._graph.findings.index(earlier)] = finding
        else:
            return
        self._reported[sources] = finding


def overlap(a: Cell, b: Cell) -> bool:
    """Whether two windows of one storage have an element in common."""
    return windows_overlap(a.geometry, b.geometry)


def span(cell: Cell) -> tuple[int, int]:
    """The first and the last byte of a window, on any rank that it is of; empty if last < first."""
    offset, shape, strides, dtype, *_ = cell.geometry
    if 0 in shape:
        return 0, -1
    first, last = (offset, offset) if isinstance(offset, int) else (int(offset.numbers.min()), int(offset.numbers.max()))
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return first * dtype.itemsize, (last + reach + 1) * dtype.itemsize - 1


def windows_overlap(a: Geometry, b: Geometry) -> bool:
    """Whether two windows of one storage have a byte in common, on any rank that they are of: whether the distance between
    their first bytes is a sum of multiples of their strides, each multiple within the bounds that the sizes set."""
    if not isinstance(a[0], int) or not isinstance(b[0], int):
        pairs = np.unique(np.stack(np.broadcast_arrays(*(getattr(w[0], "numbers", w[0]) for w in (a, b))), axis=-1), axis=0)
        return any(windows_overlap((one, *a[1:]), (other, *b[1:])) for one, other in np.atleast_2d(pairs).tolist())
    if 0 in a[1] or 0 in b[1]:
        return False
    bounds: dict[int, tuple[int, int]] = {}
    for window, forward in ((a, True), (b, False)):
        _, shape, strides, dtype, *_ = window
        steps = [(size - 1, stride * dtype.itemsize) for size, stride in zip(shape, strides, strict=True)]
        for reach, stride in [*steps, (dtype.itemsize - 1, 1)]:
            least, most = bounds.get(stride, (0, 0))
            bounds[stride] = (least, most + reach) if forward else (least - reach, most)
    bounds.pop(0, None)
    return _is_reachable(b[0] * b[3].itemsize - a[0] * a[3].itemsize, bounds)


def _is_reachable(distance: int, bounds: dict[int, tuple[int, int]]) -> bool:
    """Decided from the largest stride down, where the smaller ones leave little choice. Too much choice counts as True."""
    lowest = sum(stride * least for stride, (least, _) in bounds.items())
    highest = sum(stride * most for stride, (_, most) in bounds.items())
    left = {distance}
    for stride in sorted(bounds, reverse=True):
        least, most = bounds[stride]
        lowest, highest = lowest - stride * least, highest - stride * most
        following = set()
        for rest in left:
            for multiple in range(max(least, -((highest - rest) // stride)), min(most, (rest - lowest) // stride) + 1):
                following.add(rest - multiple * stride)
            if len(following) > _MOST_CHOICES:
                return True
        left = following
    return 0 in left
