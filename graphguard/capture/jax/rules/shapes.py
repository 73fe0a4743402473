"""What moves elements, or makes them of nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphguard.capture.jax.builder import per_rank
from graphguard.capture.jax.dtypes import in_graph, numpy_of
from graphguard.capture.jax.known_arrays import Known
from graphguard.capture.jax.lowering import Lowering, rule
from graphguard.errors import CaptureError
from graphguard.graph.ir import Value
from graphguard.graph.rank_class import Numbers


def shape_of(equation: Any) -> list[int]:
    return list(equation.outvars[0].aval.shape)


@rule("broadcast_in_dim")
def broadcast(low: Lowering, equation: Any, x: Any, *_: Any) -> Value:
    shape, dims = list(equation.params["shape"]), equation.params["broadcast_dimensions"]
    if isinstance(x, Known) and x.size == 1:
        return low.full(shape, Known(x.numbers))
    x = low.tensor(x)
    sizes = [x.shape[dims.index(dim)] if dim in dims else 1 for dim in range(len(shape))]
    x = low.view(x, sizes)
    return x if sizes == shape else low.build.aten("expand", x, shape)


@rule("reshape", "squeeze", "expand_dims")
def reshape(low: Lowering, equation: Any, x: Any, *_: Any) -> Value:
    if equation.primitive.name == "reshape" and equation.params.get("dimensions") is not None:
        raise CaptureError("reshape with dimensions= has no exact graph yet")
    return low.view(low.tensor(x), shape_of(equation))


@rule("transpose")
def transpose(low: Lowering, equation: Any, x: Any) -> Value:
    return low.permuted(low.tensor(x), equation.params["permutation"])


@rule("rev")
def reverse(low: Lowering, equation: Any, x: Any) -> Value:
    return low.build.aten("flip", low.tensor(x), list(equation.params["dimensions"]))


@rule("tile")
def tile(low: Lowering, equation: Any, x: Any) -> Value:
    return low.build.aten("repeat", low.tensor(x), list(equation.params["reps"]))


@rule("slice")
def cut(low: Lowering, equation: Any, operand: Any) -> Value:
    x, params = low.tensor(operand), equation.params
    strides = params["strides"] or [1] * len(x.shape)
    for dim, (start, stop, step) in enumerate(zip(params["start_indices"], params["limit_indices"], strides, strict=True)):
        if (start, stop, step) != (0, x.shape[dim], 1):
            x = low.build.aten("slice.Tensor", x, dim, start, stop, step)
    return x


@rule("split")
def split(low: Lowering, equation: Any, x: Any) -> list[Value]:
    x, start, parts = low.tensor(x), 0, []
    for size in equation.params["sizes"]:
        parts.append(low.slice(x, equation.params["axis"], np.array([start]), size))
        start += size
    return parts


@rule("unstack")
def unstack(low: Lowering, equation: Any, x: Any) -> list[Value]:
    x, axis = low.tensor(x), equation.params["axis"]
    return [low.build.aten("select.int", x, axis, place) for place in range(x.shape[axis])]


@rule("stack")
def stack(low: Lowering, equation: Any, *parts: Any) -> Value:
    return low.build.aten("stack", tuple(map(low.tensor, parts)), equation.params["axis"])


@rule("concatenate")
def concatenate(low: Lowering, equation: Any, *parts: Any) -> Value:
    return low.build.aten("cat", tuple(map(low.tensor, parts)), equation.params["dimension"])


@rule("pad")
def pad(low: Lowering, equation: Any, x: Any, filler: Any) -> Value:
    if not isinstance(filler, Known) or not filler.is_same:
        raise CaptureError("padding with what is not one known number has no exact graph yet")
    return padded(low, low.tensor(x), equation.params["padding_config"], filler.numbers[0].item())


def padded(low: Lowering, x: Value, config: Any, number: Any) -> Value:
    """config: by dim, how many go in front, behind, and between two elements."""
    for dim, (_, _, between) in enumerate(config):
        if between and x.shape[dim] > 1:
            x = _spread(low, x, dim, between, number)
    flat = [count for front, behind, _ in reversed(config) for count in (front, behind)]
    return low.build.aten("constant_pad_nd", x, flat, number) if any(flat) else x


def _spread(low: Lowering, x: Value, dim: int, between: int, number: Any) -> Value:
    """Each element with some behind it, but for the last."""
    size, behind = x.shape[dim], len(x.shape) - dim - 1
    rows = low.view(x, [*x.shape[: dim + 1], 1, *x.shape[dim + 1 :]])
    rows = low.build.aten("constant_pad_nd", rows, [0, 0] * behind + [0, between], number)
    rows = low.view(rows, [*x.shape[:dim], size * (between + 1), *x.shape[dim + 1 :]])
    return low.slice(rows, dim, np.array([0]), size * (between + 1) - between)


@rule("iota")
def iota(low: Lowering, equation: Any, *_: Any) -> Value:
    params = equation.params
    shape, dim = params["shape"], params["dimension"]
    line = low.cast(low.build.aten("arange", shape[dim], dtype="int64"), in_graph(params["dtype"]))
    line = low.view(line, [size if place == dim else 1 for place, size in enumerate(shape)])
    return line if list(line.shape) == list(shape) else low.build.aten("expand", line, list(shape))


@rule("empty", "empty2")
def empty(low: Lowering, equation: Any) -> Value:
    aval = equation.outvars[0].aval
    return low.full(aval.shape, Known(np.zeros(1, dtype=numpy_of(aval.dtype))))


# ---------------------------------------------------------------------- at positions that may be data
def first_of(start: Known, size: int, want: int) -> Numbers:
    """Where a part begins: it is moved so that it lies inside."""
    return np.clip(start.numbers, 0, size - want).astype(np.int64)


@rule("dynamic_slice")
def dynamic_slice(low: Lowering, equation: Any, operand: Any, *starts: Any) -> Value:
    x = low.tensor(operand)
    for dim, (want, start) in enumerate(zip(equation.params["slice_sizes"], starts, strict=True)):
        if want == x.shape[dim]:
            continue
        if isinstance(start, Known):
            x = low.slice(x, dim, first_of(start, x.shape[dim], want), want)
        else:
            x = low.build.aten("index_select", x, dim, _positions(low, start, x.shape[dim], want))
    return x


def _positions(low: Lowering, start: Value, size: int, want: int) -> Value:
    first = clamped(low, low.cast(start, "int64"), size - want)
    if want == 1:
        return low.view(first, [1])
    return low.build.aten("add.Tensor", low.build.aten("arange", want, dtype="int64"), first)


def clamped(low: Lowering, index: Value, most: int) -> Value:
    """From 0 to `most`."""
    return index if low.intervals.of(index).within(0, most) else low.build.aten("clamp", index, 0, most)


@rule("dynamic_update_slice")
def dynamic_update_slice(low: Lowering, equation: Any, x: Any, update: Any, *starts: Any) -> Value:
    x, update = low.tensor(x), low.tensor(update)
    dims = [dim for dim in range(len(x.shape)) if x.shape[dim] != update.shape[dim]]
    return _put(low, x, update, dims, starts)


def _put(low: Lowering, x: Value, update: Value, dims: list[int], starts: tuple[Any, ...]) -> Value:
    """The update in the place of a part of x, dim by dim."""
    if not dims:
        return update
    dim, want = dims[0], update.shape[dims[0]]
    start = starts[dim]
    if isinstance(start, Known):
        first = first_of(start, x.shape[dim], want)
        inner = _put(low, low.slice(x, dim, first, want), update, dims[1:], starts)
        return low.build.aten("slice_scatter", x, inner, dim, per_rank(first), per_rank(first + want), 1)
    positions = _positions(low, start, x.shape[dim], want)
    inner = _put(low, low.build.aten("index_select", x, dim, positions), update, dims[1:], starts)
    return low.build.aten("index_copy", x, dim, positions, inner)
