"""Convolutions, with torch's order of dims: batch, channels, space."""

from __future__ import annotations

from typing import Any

from graphguard.capture.jax.lowering import Lowering, rule
from graphguard.capture.jax.rules.shapes import padded
from graphguard.errors import CaptureError
from graphguard.graph.ir import Value


@rule("conv_general_dilated")
def convolution(low: Lowering, equation: Any, x: Any, weight: Any) -> Value:
    params = equation.params
    if params["batch_group_count"] != 1:
        raise CaptureError("groups of the batch have no exact graph yet")
    numbers = params["dimension_numbers"]
    dtype = str(equation.outvars[0].aval.dtype)
    x = low.cast(low.permuted(low.tensor(x), numbers.lhs_spec), dtype)
    weight = low.cast(low.permuted(low.tensor(weight), numbers.rhs_spec), dtype)
    gaps = [size - 1 for size in params["lhs_dilation"]]
    borders = [(*pair, between) for pair, between in zip(params["padding"], gaps, strict=True)]
    space = len(borders)
    even = all(front == behind >= 0 and not between for front, behind, between in borders)
    if not even:
        x = padded(low, x, [(0, 0, 0), (0, 0, 0), *borders], 0)
    padding = [front for front, _, _ in borders] if even else [0] * space
    made = low.build.aten(
        "convolution", x, weight, None, list(params["window_strides"]), padding, list(params["rhs_dilation"]), False,
        [0] * space, params["feature_group_count"],
    )  # fmt: skip
    places = list(numbers.out_spec)
    return low.permuted(made, [places.index(dim) for dim in range(len(places))])
