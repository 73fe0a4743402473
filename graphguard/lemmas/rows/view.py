"""Operators that move elements and compute nothing."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

from graphguard.engine.tensors.integer import in_pieces
from graphguard.engine.terms.lane import Lane, collapse, larger, smaller, varies
from graphguard.engine.terms.term import Undescribed, Value
from graphguard.graph.ir import values_in
from graphguard.lemmas.registry import Call, row


def _dim(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


@row("aten.view.default", means="the same elements in row-major order", complex=True)
def view(c: Call, x: Value, *_: Any) -> Value:
    return c.reshape(x, c.shape)


@row("aten.t.default", means="x transposed", complex=True)
def t(c: Call, x: Value) -> Value:
    return c.transpose(x, 0, 1) if c.rank() == 2 else x


@row("aten.transpose.int", means="two dims exchanged", complex=True)
def transpose(c: Call, x: Value, a: int, b: int) -> Value:
    return c.transpose(x, _dim(a, c.rank()), _dim(b, c.rank())) if c.rank() else x


@row("aten.permute.default", means="dims in another order", complex=True)
def permute(c: Call, x: Value, order: Sequence[int]) -> Value:
    rank = c.rank()
    return c.permute(x, [*(_dim(d, rank) for d in order), *range(rank, len(x.shape))])


@row("aten.expand.default", means="dims of size 1 repeated", complex=True)
def expand(c: Call, x: Value, *_: Any, **__: Any) -> Value:
    if len(x.shape) < len(c.shape):  # new dims come in front, also of a complex tensor
        x = c.reshape(x, [1] * (len(c.shape) - len(x.shape)) + list(x.shape))
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


def bounds(size: int, start: Lane | None, stop: Lane | None) -> tuple[Lane, Lane]:
    """Python's rule for slices."""

    def settled(position: Lane) -> Lane:
        if varies(position):
            return smaller(larger(collapse(position + (position < 0) * size), 0), size)
        return min(max(position + size if position < 0 else position, 0), size)

    low = 0 if start is None else settled(start)
    high = size if stop is None or (type(stop) is int and stop >= min(size, sys.maxsize)) else settled(stop)
    return low, larger(low, high)


@row("aten.slice.Tensor", means="the elements between two positions of a dim", complex=True)
def slice_(c: Call, x: Value, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> Value:
    dim = _dim(dim, c.rank())
    low, high = bounds(c.size(x, dim), start, stop)
    part = c.cut(x, dim, low, high)
    return part if step == 1 else every(c, part, dim, step)


def every(c: Call, x: Value, dim: int, step: int) -> Value:
    """Each step-th element from the first on."""
    x = _without_rest(c, x, dim, step)
    size = c.size(x, dim)
    count = -(-size // step)
    if in_pieces(x) and not c.table.over("strided_rows", count):
        return c.concat([c.cut(x, dim, place, place + 1) for place in range(0, size, step)], dim)
    if size % step:
        return picked(c, x, dim, c.scale(c.arange(count), step))
    rows = c.reshape(x, [*x.shape[:dim], count, step, *x.shape[dim + 1 :]])
    return c.reshape(c.cut(rows, dim + 1, 0, 1), [*x.shape[:dim], count, *x.shape[dim + 1 :]])


def _without_rest(c: Call, x: Value, dim: int, step: int) -> Value:
    """Without what lies behind the last element that is read, where that is another number of elements on each rank."""
    size = x.shape[dim]
    if isinstance(size, int):
        return x
    count = collapse(-(-size // step))
    return c.cut(x, dim, 0, larger(0, collapse((count - 1) * step + 1)))


@row("aten.split_with_sizes_copy.default", "aten.split_with_sizes_copy.out", means="parts of a dim, one after the other")
def split_with_sizes_copy(c: Call, x: Value, sizes: Sequence[int], dim: int = 0) -> tuple[Value, ...]:
    dim = _dim(dim, c.rank())
    ends = list(itertools.accumulate(sizes))
    return tuple(c.cut(x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True))


@row("aten.select.int", means="one position of a dim", complex=True)
def select(c: Call, x: Value, dim: int, position: Any) -> Value:
    dim = _dim(dim, c.rank())
    size = c.size(x, dim)
    position = collapse(position + (position < 0) * size) if varies(position) else position % size
    part = c.cut(x, dim, position, collapse(position + 1))
    return c.reshape(part, [*part.shape[:dim], *part.shape[dim + 1 :]])


@row("aten.cat.default", means="tensors side by side", complex=True)
def cat(c: Call, xs: Sequence[Value], dim: int = 0) -> Value:
    _require_one_kind(c)
    rank = len(c.node.outputs[0].shape)
    if rank != 1:
        xs = [x for x, tensor in zip(xs, values_in(c.node.args), strict=True) if tensor.shape != (0,)]
    return c.concat(xs, _dim(dim, rank)) if xs else c.zeros(c.shape)


@row("aten.stack.default", means="tensors side by side along a new dim", complex=True)
def stack(c: Call, xs: Sequence[Value], dim: int = 0) -> Value:
    _require_one_kind(c)
    dim = _dim(dim, len(c.node.outputs[0].shape))
    return c.concat([c.reshape(x, [*x.shape[:dim], 1, *x.shape[dim:]]) for x in xs], dim)


def _require_one_kind(c: Call) -> None:
    if len({tensor.dtype.startswith("complex") for tensor in c.node.operands()}) > 1:
        raise Undescribed("real and complex numbers side by side")


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
    positions = c.add(c.scale(c.arange(c.size(g, dim)), step), c.full((), low))
    labels = LETTERS[: len(sizes)]
    hot = c.one_hot(positions, sizes[dim], 1)
    return c.selected([labels[:dim] + "z" + labels[dim + 1 :], "z" + labels[dim]], labels, g, hot)


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


@row("aten.constant_pad_nd.default", means="x with a margin, or without one")
def pad(c: Call, x: Value, margins: Sequence[int], value: Any = 0) -> Value:
    value = c.stored(value, c.result_dtype)
    for place in range(0, len(margins), 2):
        dim = len(x.shape) - 1 - place // 2
        for before, margin in ((True, margins[place]), (False, margins[place + 1])):
            size = c.size(x, dim)
            if margin < 0:
                x = c.cut(x, dim, -margin, size) if before else c.cut(x, dim, 0, size + margin)
            elif margin > 0:
                edge = c.full([*x.shape[:dim], margin, *x.shape[dim + 1 :]], value)
                x = c.concat([edge, x] if before else [x, edge], dim)
    return x


@row("aten.roll.default", means="x moved around", needs="dims, or a tensor of one dim")
def roll(c: Call, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    if not dims:
        return c.reshape(roll(c, c.reshape(x, [math.prod(c.shape)]), shifts, (0,)), c.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        dim = _dim(dim, len(x.shape))
        size = c.size(x, dim)
        at = (-shift) % size if size else 0
        x = c.concat([c.cut(x, dim, at, size), c.cut(x, dim, 0, at)], dim)
    return x


LETTERS = "abcdefghijklmnop"


@row("aten.flip.default", means="dims in reverse")
def flip(c: Call, x: Value, dims: Sequence[int]) -> Value:
    for dim in (_dim(d, len(x.shape)) for d in dims):
        if x.shape and c.size(x, dim) > 1:
            size = c.size(x, dim)
            x = picked(c, x, dim, c.sub(c.full((), size - 1), c.arange(size)))
    return x


def picked(c: Call, x: Value, dim: int, positions: Value) -> Value:
    """x at positions of a dim, which has as many dims then as there are dims of positions."""
    labels, new = LETTERS[: len(x.shape)], "qrstuvwxyz"[: len(positions.shape)]
    hot = c.one_hot(positions, c.size(x, dim), len(positions.shape))
    return c.selected([labels, new + labels[dim]], labels[:dim] + new + labels[dim + 1 :], x, hot)


@row("aten.unfold.default", means="windows of a dim, each along a new last dim")
def unfold(c: Call, x: Value, dim: int, size: int, step: int) -> Value:
    if not x.shape:
        return c.reshape(x, c.shape)
    dim = _dim(dim, len(x.shape))
    count = c.shape[dim]
    starts = c.reshape(c.scale(c.arange(count), step), [count, 1])
    windows = picked(c, x, dim, c.add(starts, c.arange(size)))
    order = [d for d in range(len(windows.shape)) if d != dim + 1]
    return c.permute(windows, [*order, dim + 1])


def _diagonal_labels(rank: int, first: int, second: int) -> tuple[str, str]:
    """Labels of a tensor, and of those of its dims that are not on the diagonal."""
    labels = LETTERS[:rank]
    return labels, "".join(label for dim, label in enumerate(labels) if dim not in (first, second))


@row("aten.diagonal.default", means="x[i, i + offset]")
def diagonal(c: Call, x: Value, offset: int = 0, first: int = 0, second: int = 1) -> Value:
    rank, count = len(x.shape), c.shape[-1]
    first, second = _dim(first, rank), _dim(second, rank)
    x = c.cut(x, first, max(0, -offset), max(0, -offset) + count)
    x = c.cut(x, second, max(0, offset), max(0, offset) + count)
    labels, rest = _diagonal_labels(rank, first, second)
    both = [c.one_hot(c.arange(count), count, 1)] * 2
    return c.selected([labels, "z" + labels[first], "z" + labels[second]], rest + "z", x, *both)


def embedded(c: Call, x: Value, shape: Sequence[int], offset: int, first: int, second: int) -> Value:
    """The last dim of x along the diagonal of two new dims, in zeros."""
    labels, rest = _diagonal_labels(len(shape), first, second)
    count = c.size(x, len(x.shape) - 1)
    down = c.one_hot(c.arange(count, max(0, -offset)), shape[first], 1)
    right = c.one_hot(c.arange(count, max(0, offset)), shape[second], 1)
    return c.selected([rest + "z", "z" + labels[first], "z" + labels[second]], labels, x, down, right)


@row("aten.diag_embed.default", means="x along a diagonal, in zeros")
def diag_embed(c: Call, x: Value, offset: int = 0, first: int = -2, second: int = -1) -> Value:
    return embedded(c, x, c.shape, offset, _dim(first, len(c.shape)), _dim(second, len(c.shape)))


@row("aten.diagonal_backward.default", means="g along a diagonal, in zeros")
def diagonal_backward(c: Call, g: Value, _: Any, offset: int, first: int, second: int) -> Value:
    return diag_embed(c, g, offset, first, second)


@row("aten.diagonal_scatter.default", means="x with a diagonal replaced")
def diagonal_scatter(c: Call, x: Value, y: Value, offset: int = 0, first: int = 0, second: int = 1) -> Value:
    first, second = _dim(first, len(x.shape)), _dim(second, len(x.shape))
    there = embedded(c, c.ones(y.shape), c.shape, offset, first, second)
    return c.add(c.mul(x, c.negate(there)), embedded(c, y, c.shape, offset, first, second))


@row("aten.pixel_shuffle.default", "aten.pixel_unshuffle.default", means="channels as blocks of pixels, and back")
def pixel_shuffle(c: Call, x: Value, factor: int) -> Value:
    lead = [c.size(x, d) for d in range(len(x.shape) - 3)]
    channels, height, width = (c.size(x, len(lead) + d) for d in range(3))
    if "unshuffle" in c.node.op:
        split, order = [channels, height // factor, factor, width // factor, factor], (0, 2, 4, 1, 3)
    else:
        split, order = [channels // factor**2, factor, factor, height, width], (0, 3, 1, 4, 2)
    wide = c.reshape(x, [*lead, *split])
    return c.reshape(c.permute(wide, [*range(len(lead)), *(len(lead) + d for d in order)]), c.shape)
