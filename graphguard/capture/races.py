"""Buffers in flight: what asynchronous communication reads or fills must be left alone until its wait."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphguard.findings import Finding
from graphguard.ir import Graph, Source

if TYPE_CHECKING:
    from graphguard.capture.aliasing import Cell

_EXACT_LIMIT = 1 << 22  # elements; above this two windows are taken to overlap if their spans do


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
            window.cell.storage.in_flight.remove(window)

    def read(self, cells: Iterable[Cell], source: Source | None) -> None:
        for cell in cells:
            for window in cell.storage.in_flight:
                if window.fills and _overlap(cell, window.cell):
                    self._report("read", window, source)

    def write(self, cells: Iterable[Cell], source: Source | None) -> None:
        for cell in cells:
            for window in cell.storage.in_flight:
                if _overlap(cell, window.cell):
                    self._report("written", window, source)

    def _report(self, verb: str, window: Window, source: Source | None) -> None:
        role = "fills" if window.fills else "reads"
        message = (
            f"a buffer that {window.op} ({window.source}) {role} in the background is {verb} at {source} before its wait; "
            "call wait() first, or use another buffer"
        )
        sources = tuple(s for s in (source, window.source) if s is not None)
        finding = Finding("race", message, () if self._graph.rank is None else (self._graph.rank,), sources)
        if finding not in self._graph.findings:
            self._graph.findings.append(finding)


def _overlap(a: Cell, b: Cell) -> bool:
    """Whether two windows of one storage have an element in common."""
    first_a, last_a = _span(a)
    first_b, last_b = _span(b)
    if last_a < first_b or last_b < first_a or first_a > last_a or first_b > last_b:
        return False
    if a.value.numel > _EXACT_LIMIT or b.value.numel > _EXACT_LIMIT:
        return True
    return bool(np.intersect1d(_bytes(a), _bytes(b)).size)


def _span(cell: Cell) -> tuple[int, int]:
    """The first and the last byte of a window; empty if last < first."""
    offset, shape, strides, dtype, *_ = cell.geometry
    if 0 in shape:
        return 0, -1
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return offset * dtype.itemsize, (offset + reach + 1) * dtype.itemsize - 1


def _bytes(cell: Cell) -> np.ndarray:
    """Addresses of the first byte of each element. Windows of one storage are compared at equal element sizes, or not at all."""
    offset, shape, strides, dtype, *_ = cell.geometry
    addresses = np.array([offset], dtype=np.int64)
    for size, stride in zip(shape, strides, strict=True):
        addresses = (addresses[:, None] + np.arange(size, dtype=np.int64)[None, :] * stride).reshape(-1)
    item = dtype.itemsize
    return np.unique((addresses[:, None] * item + np.arange(item)[None, :]).reshape(-1))
