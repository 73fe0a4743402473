"""`scatter` and its kin: windows that are written to an operand, or combined with it, at positions that are data.

Windows that are not inside are dropped, as JAX does it, unless they are moved inside (`mode="clip"`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphguard.capture.jax.builder import per_rank
from graphguard.capture.jax.known_arrays import Known
from graphguard.capture.jax.lowering import Lowering, rule
from graphguard.capture.jax.rules.shapes import clamped
from graphguard.capture.jax.rules.windows import Windows, all_known, components, inside, lined_up, positions, unwrapped
from graphguard.errors import CaptureError
from graphguard.graph.ir import Value

_COMBINED = {"scatter_mul": "prod", "scatter_min": "amin", "scatter_max": "amax"}


@rule("scatter", "scatter-add", "scatter_add", *_COMBINED, *(name.replace("_", "-") for name in _COMBINED))
def scatter(low: Lowering, equation: Any, x: Any, indices: Any, updates: Any) -> Any:
    name = equation.primitive.name.replace("-", "_")
    x, updates, starts = low.tensor(x), low.tensor(updates), components(low, indices)
    windows = _windows(equation.params, x, updates)
    most = [x.shape[dim] - windows.sizes[dim] for dim in windows.mapped]
    clips = "clip" in str(equation.params["mode"]).lower()
    if name in ("scatter", "scatter_add") and all_known(starts) and not windows.rows:
        known = _known_inside(starts, most, clips)
        if known is not None:
            return _at_once(low, windows, x, updates, known, name == "scatter_add")
    if name == "scatter" and not equation.params["unique_indices"] and _is_many(updates, windows):
        low.build.assumptions.add(f"{low.build.source}: the positions that are written to differ from each other")
    settled, masks = [], []
    for start, limit in zip(starts, most, strict=True):
        index = low.cast(low.tensor(start), "int64")
        if not low.intervals.of(index).within(0, limit):
            if clips:
                index = clamped(low, index, limit)
            else:
                mask, index = inside(low, index, limit)
                masks.append(mask)
                index = low.build.aten("where.self", mask, index, low.build.aten("full", [], 0, dtype="int64"))
        else:
            index = unwrapped(low, index, limit)
        settled.append(index)
    return _written(low, name, windows, x, updates, settled, masks)


def _windows(params: Any, x: Value, updates: Value) -> Windows:
    numbers = params["dimension_numbers"]
    gone = tuple(numbers.inserted_window_dims)
    rows = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    window = tuple(numbers.update_window_dims)
    sizes, left = [], list(window)
    for dim in range(len(x.shape)):
        sizes.append(1 if dim in gone or dim in rows else updates.shape[left.pop(0)])
    batch = tuple(dim for dim in range(len(updates.shape)) if dim not in window)
    return Windows(tuple(sizes), tuple(numbers.scatter_dims_to_operand_dims), gone, rows, batch, window)


def _is_many(updates: Value, windows: Windows) -> bool:
    """Whether there are several windows that might meet."""
    rows = set(windows.rows.values())
    return math.prod(updates.shape[dim] for place, dim in enumerate(windows.batch) if place not in rows) > 1


def _known_inside(starts: list[Known], most: list[int], clips: bool) -> list[Any] | None:
    """Where the one window begins, by rank; None if it is dropped on some."""
    found = []
    for start, limit in zip(starts, most, strict=True):
        numbers = np.clip(start.numbers, 0, limit)
        if not clips and not (numbers == start.numbers).all():
            return None
        found.append(numbers.astype(np.int64))
    return found


def _at_once(low: Lowering, windows: Windows, x: Value, updates: Value, starts: list[Any], add: bool) -> Value:
    """One window, at a position that is known."""
    new = low.view(updates, windows.sizes)
    steps = [x]
    first = {dim: start for dim, start in zip(windows.mapped, starts, strict=True) if windows.sizes[dim] != x.shape[dim]}
    others = [dim for dim in range(len(x.shape)) if windows.sizes[dim] != x.shape[dim] and dim not in first]
    first |= {dim: np.array([0]) for dim in others}
    dims = sorted(first)
    for dim in dims:
        steps.append(low.slice(steps[-1], dim, first[dim], windows.sizes[dim]))
    if add:
        new = low.build.aten("add.Tensor", steps[-1], new)
    for dim, around in zip(reversed(dims), reversed(steps[:-1]), strict=True):
        ends = per_rank(first[dim]), per_rank(first[dim] + windows.sizes[dim])
        new = low.build.aten("slice_scatter", around, new, dim, *ends, 1)
    return new


def _written(
    low: Lowering, name: str, windows: Windows, x: Value, updates: Value, starts: list[Value], masks: list[Value]
) -> Value:
    mask = None
    for each in masks:
        mask = each if mask is None else low.build.aten("bitwise_and.Tensor", mask, each)
    if name == "scatter_add":
        return _added(low, windows, x, _without(low, windows, updates, mask), starts)
    if mask is None:
        return _put(low, name, windows, x, updates, starts)
    dim = windows.mapped[0]  # what is dropped goes behind the end, which is cut off
    size, room = x.shape[dim], windows.sizes[dim]
    wider = low.build.aten("constant_pad_nd", x, [0, 0] * (len(x.shape) - dim - 1) + [0, room], 0)
    behind = low.build.aten("full", [], size, dtype="int64")
    starts = [low.build.aten("where.self", mask, starts[0], behind), *starts[1:]]
    made = _put(low, name, windows, wider, updates, starts)
    return low.slice(made, dim, np.array([0]), size)


def _without(low: Lowering, windows: Windows, updates: Value, mask: Value | None) -> Value:
    """Zeros in the place of what is dropped."""
    if mask is None:
        return updates
    sizes = [1] * len(updates.shape)
    for dim, size in zip(windows.batch, mask.shape, strict=True):
        sizes[dim] = size
    zero = low.build.aten("full", [], 0, dtype=updates.dtype)
    return low.build.aten("where.self", low.view(mask, sizes), updates, zero)


def _added(low: Lowering, windows: Windows, x: Value, updates: Value, starts: list[Value]) -> Value:
    if windows.is_rows(x.shape):
        dim, index, rows = _as_rows(low, windows, x, updates, starts[0])
        return low.build.aten("index_add", x, dim, index, rows)
    if windows.is_elements() and len(starts[0].shape) <= len(windows.rows) + 1 and not windows.window:
        (dim,) = windows.mapped
        return low.build.aten("scatter_add", x, dim, *(lined_up(low, windows, each) for each in (starts[0], updates)))
    places = positions(low, windows, starts, updates.shape)
    return low.build.aten("index_put", x, places, updates, True)


def _put(low: Lowering, name: str, windows: Windows, x: Value, updates: Value, starts: list[Value]) -> Value:
    if name == "scatter" and windows.is_rows(x.shape):
        dim, index, rows = _as_rows(low, windows, x, updates, starts[0])
        return low.build.aten("index_copy", x, dim, index, rows)
    places = positions(low, windows, starts, updates.shape)
    if name == "scatter":
        return low.build.aten("index_put", x, places, updates, False)
    if name not in _COMBINED:
        raise CaptureError("it has no exact graph yet")
    line = low.build.aten("full", [], 0, dtype="int64")
    for dim, place in enumerate(places):
        line = low.build.aten("add.Tensor", low.build.aten("mul.Tensor", line, x.shape[dim]), place)
    line = low.build.aten("expand", line, list(updates.shape))
    flat = [low.view(each, [math.prod(each.shape)]) for each in (x, line, updates)]
    made = low.build.aten("scatter_reduce.two", flat[0], 0, flat[1], flat[2], _COMBINED[name])
    return low.view(made, x.shape)


def _as_rows(low: Lowering, windows: Windows, x: Value, updates: Value, index: Value) -> tuple[int, Value, Value]:
    """Whole rows of the operand along a dim: which ones, and what is written there."""
    (dim,) = windows.mapped
    rows = low.permuted(updates, [*windows.window[:dim], *windows.batch, *windows.window[dim:]])
    count = math.prod(index.shape)
    return dim, low.view(index, [count]), low.view(rows, [*x.shape[:dim], count, *x.shape[dim + 1 :]])
