"""Orders of elements."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphguard.capture.jax.lowering import Lowering, rule
from graphguard.errors import CaptureError
from graphguard.graph.ir import Value


@rule("sort")
def sort(low: Lowering, equation: Any, *operands: Any) -> list[Value]:
    """By the first keys, the first of them most: sorted by each, the last one first, equal ones staying in order."""
    params, values = equation.params, [low.tensor(operand) for operand in operands]
    dim, keys = params["dimension"], params["num_keys"]
    if not params["is_stable"] and len(values) > keys:
        low.build.assumptions.add(
            f"{low.build.source}: equal keys stay in their order, though is_stable=False promises nothing"
        )
    for key in reversed(range(keys)):
        ordered, order = _sorted(low, values[key], dim)
        values = [ordered if place == key else low.build.aten("gather", each, dim, order) for place, each in enumerate(values)]
    return values


@rule("top_k")
def top_k(low: Lowering, equation: Any, x: Any) -> list[Value]:
    """Of equal elements the first ones, as XLA has it."""
    x = low.tensor(x)
    axis, count = equation.params.get("axis", len(x.shape) - 1) % len(x.shape), equation.params["k"]
    ordered, order = _sorted(low, x, axis, descending=True)
    return [low.slice(each, axis, np.array([0]), count) for each in (ordered, order)]


def _sorted(low: Lowering, x: Value, dim: int, descending: bool = False) -> tuple[Value, Value]:
    if x.dtype.startswith("complex"):
        raise CaptureError("complex numbers have no order here")
    ordered, order = low.build.several("sort.stable", x, stable=True, dim=dim, descending=descending)
    return ordered, order
