"""Products and what is taken along dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from graphguard.aten.operators import DTYPES
from graphguard.capture.jax.dtypes import in_graph
from graphguard.capture.jax.lowering import Lowering, rule
from graphguard.capture.jax.rules.shapes import padded, shape_of
from graphguard.errors import CaptureError
from graphguard.graph.ir import Value


@rule("dot_general")
def dot_general(low: Lowering, equation: Any, a: Any, b: Any) -> Value:
    """One product of matrices, or one for each place in the batch. Over the reals, how exactly it is summed does not matter."""
    (summed_a, summed_b), (batch_a, batch_b) = equation.params["dimension_numbers"]
    x, y = low.tensor(a), low.tensor(b)
    dtype = _widest(x.dtype, y.dtype, in_graph(equation.outvars[0].aval.dtype))
    x, y = low.cast(x, dtype), low.cast(y, dtype)
    free_a = [dim for dim in range(len(x.shape)) if dim not in (*summed_a, *batch_a)]
    free_b = [dim for dim in range(len(y.shape)) if dim not in (*summed_b, *batch_b)]
    if batch_a:
        made = low.build.aten("bmm", _laid(low, x, batch_a, free_a, summed_a), _laid(low, y, batch_b, summed_b, free_b))
    else:
        made = low.build.aten("mm", _laid(low, x, free_a, summed_a), _laid(low, y, summed_b, free_b))
    return low.wrapped(low.view(made, shape_of(equation)), equation.outvars[0].aval.dtype)


def _widest(*dtypes: str) -> str:
    found = DTYPES[dtypes[0]]
    for name in dtypes[1:]:
        found = torch.promote_types(found, DTYPES[name])
    return str(found).removeprefix("torch.")


def _laid(low: Lowering, x: Value, *groups: Sequence[int]) -> Value:
    """With the dims of each group as one, in this order."""
    order = [dim for group in groups for dim in group]
    sizes = [math.prod(x.shape[dim] for dim in group) for group in groups]
    return low.view(low.permuted(x, order), sizes)


@rule("reduce_sum")
def reduce_sum(low: Lowering, equation: Any, x: Any) -> Any:
    x, axes = low.tensor(x), list(equation.params["axes"])
    if not axes:
        return x
    return low.wrapped(low.build.aten("sum.dim_IntList", x, axes, False, dtype=x.dtype), equation.outvars[0].aval.dtype)


@rule("reduce_max", "reduce_min")
def reduce_extreme(low: Lowering, equation: Any, x: Any) -> Any:
    x, axes = low.tensor(x), list(equation.params["axes"])
    if not axes:
        return x
    return low.build.aten("amax" if equation.primitive.name == "reduce_max" else "amin", x, axes, False)


@rule("reduce_prod")
def reduce_product(low: Lowering, equation: Any, x: Any) -> Value:
    x = low.tensor(x)
    for axis in sorted(equation.params["axes"], reverse=True):
        x = low.build.aten("prod.dim_int", x, axis, False, dtype=x.dtype)
    return low.wrapped(x, equation.outvars[0].aval.dtype)


@rule("reduce_and", "reduce_or")
def reduce_logic(low: Lowering, equation: Any, x: Any) -> Value:
    x = low.tensor(x)
    if x.dtype != "bool":
        raise CaptureError("of whole numbers it has no exact graph yet")
    if all(x.shape[axis] == 1 for axis in equation.params["axes"]):
        return low.view(x, shape_of(equation))
    op = "all.dims" if equation.primitive.name == "reduce_and" else "any.dims"
    return low.build.aten(op, x, list(equation.params["axes"]))


@rule("argmax", "argmin")
def place_of_extreme(low: Lowering, equation: Any, x: Any) -> Value:
    """The first of equal ones, in JAX and in torch."""
    (axis,) = equation.params["axes"]
    return low.build.aten(equation.primitive.name, low.tensor(x), axis, False)


# ---------------------------------------------------------------------- along a dim
_RUNNING = {"cumsum": "cumsum", "cumprod": "cumprod", "cummax": "cummax", "cummin": "cummin", "cumlogsumexp": "logcumsumexp"}


@rule(*_RUNNING)
def running(low: Lowering, equation: Any, x: Any) -> Value:
    name, axis, back = equation.primitive.name, equation.params["axis"], equation.params["reverse"]
    x = low.tensor(x)
    x = low.build.aten("flip", x, [axis]) if back else x
    if name in ("cumsum", "cumprod"):
        x = low.wrapped(low.build.aten(name, x, axis, dtype=x.dtype), equation.outvars[0].aval.dtype)
    else:
        x = low.build.several(_RUNNING[name], x, axis)[0]
    return low.build.aten("flip", x, [axis]) if back else x


# ---------------------------------------------------------------------- in windows
_IN_WINDOWS = {
    "reduce_window_sum": ("sum.dim_IntList", 0),
    "reduce_window_max": ("amax", -math.inf),
    "reduce_window_min": ("amin", math.inf),
}


@rule(*_IN_WINDOWS)
def windows(low: Lowering, equation: Any, operand: Any) -> Value:
    params = equation.params
    op, neutral = _IN_WINDOWS[equation.primitive.name]
    x = low.tensor(operand)
    if any(each != 1 for each in (*(params.get("window_dilation") or ()), *(params.get("base_dilation") or ()))):
        raise CaptureError("windows with gaps have no exact graph yet")
    if not x.dtype.startswith(("float", "bfloat")) and neutral:
        raise CaptureError("of whole numbers it has no exact graph yet")
    x = padded(low, x, [(*pair, 0) for pair in params["padding"]], neutral)
    rank = len(x.shape)
    dims: list[int] = []
    for dim, (size, step) in enumerate(zip(params["window_dimensions"], params["window_strides"], strict=True)):
        if (size, step) != (1, 1):
            x = low.build.aten("unfold", x, dim, size, step)
            dims.append(rank + len(dims))
    if not dims:
        return x
    return low.build.aten(op, x, dims, False)
