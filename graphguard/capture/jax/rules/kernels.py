"""Kernels by Pallas, through what the user says that they compute."""

from __future__ import annotations

from typing import Any

from graphguard.capture.jax.lowering import Lowering, rule
from graphguard.errors import CaptureError


@rule("pallas_call")
def kernel(low: Lowering, equation: Any, *operands: Any) -> list[Any]:
    name = equation.params["name"]
    lemma = low.kernels.get(name)
    if lemma is None:
        raise CaptureError(f"the kernel {name} is opaque; say what it computes by lemmas=[gg.jax.lemma({name!r}, function)]")
    traced = lemma.traced(equation)
    low.build.assumptions.add(lemma.assumption(equation, traced))
    return low.closed(traced, operands)
