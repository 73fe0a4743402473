"""Operators that move elements and compute nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from graphguard.engine.lane import Lane, collapse, larger, smaller, varies
from graphguard.engine.term import Undescribed, Value
from graphguard.lemmas.registry import Call, row


def _dim(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


@row(
    "aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.squeeze.dim", "aten.squeeze.default",
    "aten.squeeze.dims", "aten.unsqueeze.default", "aten.flatten.using_ints", "aten._reshape_alias.default",
    means="the same elements in row-major order",
)  # fmt: skip
def view(c: Call, x: Value, *_: Any) -> Value:
    if c.dtype(0).startswith("complex"):
        return c.reshape(x, (*c.shape, 2))
    return c.reshape(x, c.shape)


@row("aten.view_as_complex.default", "aten.view_as_real.default", means="pairs of reals as complex numbers, and back")
def complex_view(c: Call, x: Value) -> Value:
    return x


@row("aten.polar.default", means="(a cos(b), a sin(b))")
def polar(c: Call, a: Value, b: Value) -> Value:
    parts = [c.mul(a, c.fn(name, b)) for name in ("cos", "sin")]
    return c.concat([c.reshape(part, (*part.shape, 1)) for part in parts], len(a.shape))


@row("aten.t.default", means="x transposed")
def t(c: Call, x: Value) -> Value:
    return c.transpose(x, 0, 1) if len(x.shape) == 2 else x


@row("aten.transpose.int", means="two dims exchanged")
def transpose(c: Call, x: Value, a: int, b: int) -> Value:
    rank = len(c.shape)
    return c.transpose(x, _dim(a, rank), _dim(b, rank))


@row("aten.permute.default", means="dims in another order")
def permute(c: Call, x: Value, order: Sequence[int]) -> Value:
    rank = len(order)
    tail = range(rank, len(x.shape))
    return c.permute(x, [*(_dim(d, rank) for d in order), *tail])


@row("aten.movedim.int", means="dims in another order")
def movedim(c: Call, x: Value, source: int, target: int) -> Value:
    rank = len(c.shape)
    order = [d for d in range(rank) if d != _dim(source, rank)]
    order.insert(_dim(target, rank), _dim(source, rank))
    return c.permute(x, order)


@row("aten.expand.default", "aten.broadcast_to.default", "aten.expand_as.default", means="dims of size 1 repeated")
def expand(c: Call, x: Value, *_: Any, **__: Any) -> Value:
    return c.expand(x, c.shape)


@row("aten.repeat.default", means="copies side by side")
def repeat(c: Call, x: Value, counts: Sequence[int]) -> Value:
    x = c.reshape(x, [1] * (len(counts) - len(x.shape)) + list(x.shape))
    for dim, count in enumerate(counts):
        if count != 1:
            size = c.size(x, dim)
            wide = [*x.shape[:dim], 1, *x.shape[dim:]]
            copies = c.expand(c.reshape(x, wide), [*x.shape[:dim], count, *x.shape[dim:]])
            x = c.reshape(copies, [*x.shape[:dim], count * size, *x.shape[dim + 1 :]])
    return x


@row("aten.repeat_interleave.self_int", means="each element several times")
def repeat_interleave(c: Call, x: Value, count: int, dim: int | None = None, **_: Any) -> Value:
    if dim is None:
        raise Undescribed("repeat_interleave of a flattened tensor")
    dim = _dim(dim, len(x.shape))
    wide = c.expand(c.reshape(x, [*x.shape[: dim + 1], 1, *x.shape[dim + 1 :]]), [*x.shape[: dim + 1], count, *x.shape[dim + 1 :]])
    return c.reshape(wide, [*x.shape[:dim], c.size(x, dim) * count, *x.shape[dim + 1 :]])


def bounds(size: int, start: Lane | None, stop: Lane | None) -> tuple[Lane, Lane]:
    """Python's rule for slices."""

    def settled(position: Lane) -> Lane:
        if varies(position):
            return smaller(larger(collapse(position + (position < 0) * size), 0), size)
        return min(max(position + size if position < 0 else position, 0), size)

    low = 0 if start is None else settled(start)
    high = size if stop is None or (type(stop) is int and stop >= min(size, sys.maxsize)) else settled(stop)
    return low, larger(low, high)


@row("aten.slice.Tensor", means="the elements between two positions of a dim")
def slice_(c: Call, x: Value, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> Value:
    dim = _dim(dim, len(x.shape))
    low, high = bounds(c.size(x, dim), start, stop)
    part = c.cut(x, dim, low, high)
    return part if step == 1 else every(c, part, dim, step)


def every(c: Call, x: Value, dim: int, step: int) -> Value:
    """Each step-th element from the first on."""
    size = c.size(x, dim)
    rest = -size % step
    if rest:
        x = c.concat([x, c.zeros((*x.shape[:dim], rest, *x.shape[dim + 1 :]))], dim)
    rows = c.reshape(x, [*x.shape[:dim], (size + rest) // step, step, *x.shape[dim + 1 :]])
    return c.reshape(c.cut(rows, dim + 1, 0, 1), [*x.shape[:dim], (size + rest) // step, *x.shape[dim + 1 :]])


@row("aten.narrow.default", means="the elements between two positions of a dim")
def narrow(c: Call, x: Value, dim: int, start: int, length: int) -> Value:
    return slice_(c, x, dim, start, start + length)


@row("aten.select.int", means="one position of a dim")
def select(c: Call, x: Value, dim: int, position: Any) -> Value:
    dim = _dim(dim, len(c.shape) + 1)
    size = c.size(x, dim)
    position = collapse(position + (position < 0) * size) if varies(position) else position % size
    part = c.cut(x, dim, position, collapse(position + 1))
    return c.reshape(part, [*part.shape[:dim], *part.shape[dim + 1 :]])


@row("aten.cat.default", "aten.concat.default", means="tensors side by side")
def cat(c: Call, xs: Sequence[Value], dim: int = 0) -> Value:
    if len(c.shape) > 0:
        xs = [x for x in xs if x.shape != (0,)] or xs[:1]
    return c.concat(xs, _dim(dim, len(c.shape)))


@row("aten.stack.default", means="tensors side by side along a new dim")
def stack(c: Call, xs: Sequence[Value], dim: int = 0) -> Value:
    dim = _dim(dim, len(c.shape))
    return c.concat([c.reshape(x, [*x.shape[:dim], 1, *x.shape[dim:]]) for x in xs], dim)


@row("aten.slice_backward.default", means="g in zeros")
def slice_backward(c: Call, g: Value, sizes: Sequence[int], dim: int, start: Any, stop: Any, step: int) -> Value:
    dim = _dim(dim, len(sizes))
    if step != 1:
        return spread(c, g, sizes, dim, start, step)
    low, _ = bounds(sizes[dim], start, stop)
    return c.place(g, sizes, dim, low)


def spread(c: Call, g: Value, sizes: Sequence[int], dim: int, start: Any, step: int) -> Value:
    """Elements at each step-th position in zeros."""
    low, _ = bounds(sizes[dim], start, None)
    count = c.size(g, dim)
    column = c.reshape(g, [*g.shape[: dim + 1], 1, *g.shape[dim + 1 :]])
    rows = c.place(column, [*column.shape[: dim + 1], step, *column.shape[dim + 2 :]], dim + 1, 0)
    flat = c.reshape(rows, [*g.shape[:dim], count * step, *g.shape[dim + 1 :]])
    room = sizes[dim] - low
    flat = c.cut(flat, dim, 0, min(count * step, room)) if type(room) is int else flat
    return c.place(flat, sizes, dim, low)


@row("aten.select_backward.default", means="g in zeros")
def select_backward(c: Call, g: Value, sizes: Sequence[int], dim: int, position: Any) -> Value:
    dim = _dim(dim, len(sizes))
    position = collapse(position + (position < 0) * sizes[dim]) if varies(position) else position % sizes[dim]
    return c.place(c.reshape(g, [*g.shape[:dim], 1, *g.shape[dim:]]), sizes, dim, position)


@row("aten.slice_scatter.default", means="x with a part replaced")
def slice_scatter(c: Call, x: Value, y: Value, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> Value:
    if step != 1:
        raise Undescribed("a write to every n-th element")
    dim = _dim(dim, len(x.shape))
    size = c.size(x, dim)
    low, high = bounds(size, start, stop)
    return c.concat([c.cut(x, dim, 0, low), y, c.cut(x, dim, high, size)], dim)


@row("aten.select_scatter.default", means="x with one position replaced")
def select_scatter(c: Call, x: Value, y: Value, dim: int, position: Any) -> Value:
    dim = _dim(dim, len(x.shape))
    size = c.size(x, dim)
    position = collapse(position + (position < 0) * size) if varies(position) else position % size
    row_ = c.reshape(y, [*y.shape[:dim], 1, *y.shape[dim:]])
    return c.concat([c.cut(x, dim, 0, position), row_, c.cut(x, dim, collapse(position + 1), size)], dim)


@row("aten.constant_pad_nd.default", means="x with a margin", needs="a margin of zeros, or a cut")
def pad(c: Call, x: Value, margins: Sequence[int], value: Any = 0) -> Value:
    if value:
        raise Undescribed("a margin that is not zero")
    for place in range(0, len(margins), 2):
        dim = len(x.shape) - 1 - place // 2
        for before, margin in ((True, margins[place]), (False, margins[place + 1])):
            size = c.size(x, dim)
            if margin < 0:
                x = c.cut(x, dim, -margin, size) if before else c.cut(x, dim, 0, size + margin)
            elif margin > 0:
                zeros = c.zeros([*x.shape[:dim], margin, *x.shape[dim + 1 :]])
                x = c.concat([zeros, x] if before else [x, zeros], dim)
    return x


@row("aten.roll.default", means="x moved around")
def roll(c: Call, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    if not dims:
        raise Undescribed("a roll of a flattened tensor")
    for shift, dim in zip(shifts, dims, strict=True):
        dim = _dim(dim, len(x.shape))
        size = c.size(x, dim)
        at = size - shift % size
        x = c.concat([c.cut(x, dim, at, size), c.cut(x, dim, 0, at)], dim)
    return x
