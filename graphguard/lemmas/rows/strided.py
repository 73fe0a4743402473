"""Views by their distances in memory, which holds a tensor's elements in row-major order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from graphguard.engine.terms.term import Undescribed, Value
from graphguard.lemmas.registry import Call, row
from graphguard.lemmas.rows.view import picked


@row("aten.as_strided.default", means="elements at given distances in memory", needs="positions inside the tensor")
def as_strided(c: Call, x: Value, shape: Sequence[int], strides: Sequence[int], offset: int | None = None) -> Value:
    count = _count(c, x)
    window = _window(count, shape, strides, offset or 0)
    if window is None:
        return picked(c, c.reshape(x, [count]), 0, _places(c, count, shape, strides, offset or 0))
    part = c.reshape(x, window.grid)
    for dim, (low, high) in enumerate(window.spans):
        part = c.cut(part, dim, low, high)
    return c.reshape(c.permute(part, window.order), shape)


@row("aten.as_strided_scatter.default", means="x with the elements at given distances in memory replaced",
     needs="positions inside the tensor, in a grid of its memory")  # fmt: skip
def as_strided_scatter(
    c: Call, x: Value, y: Value, shape: Sequence[int], strides: Sequence[int], offset: int | None = None
) -> Value:
    window = _window(_count(c, x), shape, strides, offset or 0)
    if window is None:
        raise Undescribed("a write to memory in no grid of it")
    sizes = [high - low for low, high in window.spans]
    back = sorted(range(len(sizes)), key=window.order.__getitem__)
    part = c.permute(c.reshape(y, [sizes[dim] for dim in window.order]), back)
    return c.reshape(_written(c, c.reshape(x, window.grid), part, window.spans, 0), x.shape)


def _written(c: Call, x: Value, part: Value, spans: Sequence[tuple[int, int]], dim: int) -> Value:
    """x with a part of it replaced, whose dims before `dim` are all of x."""
    if dim == len(spans):
        return part
    low, high = spans[dim]
    inside = _written(c, c.cut(x, dim, low, high), part, spans, dim + 1)
    return c.concat([c.cut(x, dim, 0, low), inside, c.cut(x, dim, high, c.size(x, dim))], dim)


@dataclass(frozen=True)
class _Window:
    """A view as a cutout of memory that is seen as a grid, and the order of the grid's dims in it."""

    grid: list[int]
    spans: list[tuple[int, int]]
    order: list[int]


def _window(count: int, shape: Sequence[int], strides: Sequence[int], offset: int) -> _Window | None:
    """The largest stride is that of the grid's first dim, each of the others divides the one before, and no row of the view
    goes on in the next row of the grid."""
    dims = sorted((dim for dim, size in enumerate(shape) if size != 1), key=lambda dim: -strides[dim])
    steps = [strides[dim] for dim in dims]
    if 0 in shape or 0 in steps:
        return None
    grid, spans = [], []
    for above, step, size in zip([count, *steps], [*steps, 1], [*(shape[dim] for dim in dims), 1], strict=True):
        low = offset // step
        if above % step or low + size > above // step:
            return None
        grid.append(above // step)
        spans.append((low, low + size))
        offset -= low * step
    return _Window(grid, spans, [*sorted(range(len(dims)), key=dims.__getitem__), len(dims)])


def _count(c: Call, x: Value) -> int:
    return math.prod(c.size(x, dim) for dim in range(len(x.shape)))


def _places(c: Call, count: int, shape: Sequence[int], strides: Sequence[int], offset: int) -> Value:
    """Where in memory of so many elements those of a view lie."""
    last = offset + sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=True))
    if last >= count or 0 in shape:
        raise Undescribed("memory outside of a tensor")
    position = c.full([1] * len(shape), offset)
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        along = c.reshape(c.arange(size), [size if d == dim else 1 for d in range(len(shape))])
        position = c.add(position, c.scale(along, stride))
    return position
