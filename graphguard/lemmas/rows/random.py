"""Random numbers: two draws are never the same, so nothing is said of those that stand for no others (ranks/draws.py)."""

from __future__ import annotations

from typing import Any

from graphguard.engine.terms.term import Value
from graphguard.lemmas.registry import Call, row

_DRAWS = (
    "bernoulli.default", "bernoulli.Tensor", "bernoulli.float", "bernoulli.p", "uniform.default", "normal.default",
    "normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor", "normal.float_float", "normal_functional.default",
    "multinomial.default", "exponential.default", "geometric.default", "cauchy.default", "log_normal.default", "random.default",
    "random.from", "random.to", "poisson.default", "binomial.default", "rrelu_with_noise.default", "_sample_dirichlet.default",
    "_standard_gamma.default", "rand.default", "rand.generator", "rand_like.default", "randn.default", "randn.generator",
    "randn_like.default", "randint.default", "randint.low", "randint_like.default", "randint_like.low_dtype",
    "randperm.default", "randperm.generator", "native_dropout.default",
)  # fmt: skip


@row(*(f"aten.{name}" for name in _DRAWS), means="random numbers, unrelated to any others", complex=True)
def draw(c: Call, *_: Any, **__: Any) -> tuple[None, ...]:
    return (None,) * len(c.node.outputs)


@row("aten.native_dropout_backward.default", means="g m scale")
def dropout_backward(c: Call, g: Value, mask: Value, scale: Any) -> Value:
    return c.scale(c.mul(g, mask), scale)
