"""`gather`: windows of an operand, at positions that are data.

JAX gives every index a meaning: negative ones count from the end, and what is outside is clamped, or filled. In the sequential
program an index that is data is assumed to lie inside unless it says what to fill with, which the report lists. Of the ranks
it is not assumed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphguard.capture.jax.known_arrays import Known
from graphguard.capture.jax.lowering import Lowering, rule
from graphguard.capture.jax.rules.shapes import clamped
from graphguard.capture.jax.rules.windows import (
    Windows,
    all_known,
    components,
    from_the_front,
    inside,
    lined_up,
    positions,
    unwrapped,
)
from graphguard.graph.ir import Value


@rule("gather")
def gather(low: Lowering, equation: Any, x: Any, indices: Any) -> Any:
    shape = list(equation.outvars[0].aval.shape)
    windows = _windows(equation.params, len(shape))
    x, starts = low.tensor(x), components(low, indices)
    if all_known(starts) and not windows.rows and _one_place(low, equation.params, windows, x, starts):
        for dim, start in zip(windows.mapped, starts, strict=True):
            first = np.clip(start.numbers, 0, x.shape[dim] - windows.sizes[dim]).astype(np.int64)
            x = low.slice(x, dim, first, windows.sizes[dim])
        for dim, size in enumerate(windows.sizes):
            x = low.slice(x, dim, np.array([0]), size)
        return low.view(x, shape)
    masks, settled = [], []
    for dim, start in zip(windows.mapped, starts, strict=True):
        index, mask = _settled(low, equation.params, low.cast(low.tensor(start), "int64"), x.shape[dim] - windows.sizes[dim])
        settled.append(index)
        masks += [] if mask is None else [mask]
    made = _taken(low, windows, x, settled, shape)
    if not masks:
        return made
    mask = masks[0]
    for other in masks[1:]:
        mask = low.build.aten("bitwise_and.Tensor", mask, other)
    places = [1] * len(shape)
    for dim, size in zip(windows.batch, mask.shape, strict=True):
        places[dim] = size
    filler = low.build.aten("full", [], _filler(equation.params, str(equation.outvars[0].aval.dtype)), dtype=x.dtype)
    return low.build.aten("where.self", low.view(mask, places), made, filler)


def _windows(params: Any, rank: int) -> Windows:
    numbers = params["dimension_numbers"]
    offsets = tuple(numbers.offset_dims)
    return Windows(
        sizes=tuple(params["slice_sizes"]),
        mapped=tuple(numbers.start_index_map),
        gone=tuple(numbers.collapsed_slice_dims),
        rows=dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)),
        batch=tuple(dim for dim in range(rank) if dim not in offsets),
        window=offsets,
    )


def _mode(params: Any) -> str:
    name = str(params["mode"]).lower()
    return "clip" if "clip" in name else "fill" if "fill" in name else "promise"


def _filler(params: Any, dtype: str) -> Any:
    """What stands where an index is outside: what the program says, or what JAX takes."""
    value = params["fill_value"]
    if value is not None:
        return value if isinstance(value, (int, float, bool)) else np.asarray(value).item()
    if dtype.startswith(("float", "bfloat")):
        return math.nan
    if dtype == "bool":
        return True
    ends = np.iinfo(dtype)
    return int(ends.max if dtype.startswith("uint") else ends.min)


def _is_meant(params: Any) -> bool:
    """Whether the program says what to fill with."""
    value = params["fill_value"]
    return _mode(params) == "fill" and value is not None and np.asarray(value).item() == np.asarray(value).item()


def _one_place(low: Lowering, params: Any, windows: Windows, x: Value, starts: list[Known]) -> bool:
    """Whether a window that is known lies inside, or is moved there, on every rank."""
    if _mode(params) != "fill":
        return True
    ends = zip(windows.mapped, starts, strict=True)
    return all(((start.array >= 0) & (start.array <= x.shape[dim] - windows.sizes[dim])).all() for dim, start in ends)


def _settled(low: Lowering, params: Any, index: Value, most: int) -> tuple[Value, Value | None]:
    """An index that lies inside, and where it did before, if that is needed."""
    if low.intervals.of(index).within(0, most):
        return unwrapped(low, index, most), None
    mode = _mode(params)
    if mode == "clip":
        return clamped(low, index, most), None
    if low.build.is_sequential and not _is_meant(params) and not low.build.is_fixed(index):
        return assumed_inside(low, index, most), None
    if mode == "promise":
        low.build.assumptions.add(f"{low.build.source}: XLA clamps an index that is outside, though mode='promise_in_bounds'")
        return clamped(low, index, most), None
    mask, index = inside(low, index, most)
    return low.build.aten("where.self", mask, index, low.build.aten("full", [], 0, dtype="int64")), mask


def assumed_inside(low: Lowering, index: Value, most: int) -> Value:
    plain = from_the_front(low, index)
    low.build.assumptions.add(
        f"{low.build.source}: indices are from 0 to {most}; others, which JAX wraps, clamps or fills, are left out"
    )
    for each in {index, plain}:
        _say(low, each, most)
    return plain


def _say(low: Lowering, index: Value, most: int) -> None:
    """Of an index, and of what it is a view of."""
    while True:
        low.intervals.say(index, 0, most)
        node = low.build.made.get(index)
        if node is None or node.op not in ("aten.view.default", "aten._to_copy.default"):
            return
        index = node.args[0]  # type: ignore[assignment]


def _taken(low: Lowering, windows: Windows, x: Value, starts: list[Value], shape: list[int]) -> Value:
    if windows.is_rows(x.shape):
        return _rows(low, windows, x, starts[0], shape)
    if windows.is_elements() and len(starts[0].shape) <= len(windows.rows) + 1:
        (dim,) = windows.mapped
        made = low.build.aten("gather", x, dim, lined_up(low, windows, starts[0]))
        return _back(low, windows, made, shape)
    return low.build.aten("index.Tensor", x, positions(low, windows, starts, shape))


def _rows(low: Lowering, windows: Windows, x: Value, index: Value, shape: list[int]) -> Value:
    (dim,) = windows.mapped
    if dim == 0 and len(x.shape) == 2:
        made = low.build.aten("embedding", x, index)
    else:
        made = low.build.aten("index_select", x, dim, low.view(index, [math.prod(index.shape)]))
        made = low.view(made, [*x.shape[:dim], *index.shape, *x.shape[dim + 1 :]])
    holds = [*windows.window[:dim], *windows.batch, *windows.window[dim:]]  # which dim of the result each dim is
    return low.permuted(made, [holds.index(place) for place in range(len(shape))])


def _back(low: Lowering, windows: Windows, made: Value, shape: list[int]) -> Value:
    """Single elements as the batch lies."""
    (dim,) = windows.mapped
    rows = [windows.rows[each] for each in sorted(windows.rows)]
    kept = [place for place in range(len(shape)) if place not in rows]
    if not kept:
        made = low.view(made, [size for place, size in enumerate(made.shape) if place != dim])
        return low.permuted(made, [rows.index(place) for place in range(len(shape))])
    holds = [*rows[:dim], *kept, *rows[dim:]]
    return low.permuted(made, [holds.index(place) for place in range(len(shape))])
