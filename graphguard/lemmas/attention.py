"""Softmax and attention."""

from __future__ import annotations

from typing import Any

from graphguard.engine.ops import fraction
from graphguard.engine.term import Undescribed, Value
from graphguard.lemmas.registry import Call, row


@row("aten._softmax.default", "aten._safe_softmax.default", "aten.softmax.int", means="exp(x) / Σ exp(x)")
def softmax(c: Call, x: Value, dim: int, *_: Any, **__: Any) -> Value:
    dim %= len(x.shape)
    raised = c.exp(x)
    return c.div(raised, c.sum(raised, [dim], keep=True))


@row("aten._softmax_backward_data.default", means="y (g - Σ g y)")
def softmax_backward(c: Call, g: Value, y: Value, dim: int, *_: Any) -> Value:
    dim %= len(y.shape)
    product = c.mul(g, y)
    return c.sub(product, c.mul(y, c.sum(product, [dim], keep=True)))


@row("aten._log_softmax.default", means="x - log Σ exp(x)")
def log_softmax(c: Call, x: Value, dim: int, *_: Any) -> Value:
    dim %= len(x.shape)
    return c.sub(x, c.log(c.sum(c.exp(x), [dim], keep=True)))


@row("aten._log_softmax_backward_data.default", means="g - exp(y) Σ g")
def log_softmax_backward(c: Call, g: Value, y: Value, dim: int, *_: Any) -> Value:
    dim %= len(y.shape)
    return c.sub(g, c.mul(c.exp(y), c.sum(g, [dim], keep=True)))


def _scores(c: Call, q: Value, k: Value, causal: bool, mask: Value | None, scale: Any) -> Value:
    width = c.size(q, 3)
    product = c.einsum(["bhsd", "bhtd"], "bhst", q, k)
    scores = c.scale(product, scale) if scale is not None else c.scale(product, _default_scale(width))
    if mask is not None:
        scores = c.add(scores, mask)
    if causal:
        rows, columns = c.size(q, 2), c.size(k, 2)
        above = c.compare("gt", c.arange(columns), c.reshape(c.arange(rows), [rows, 1]), whole=True)
        scores = c.choose(above, float("-inf"), scores)
    return scores


def _default_scale(width: int) -> float:
    return float(width**-0.5)


@row(
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    means="softmax(scale q kᵀ + mask) v, and log Σ exp",
    needs="no dropout",
)
def flash(
    c: Call, q: Value, k: Value, v: Value, dropout: Any = 0.0, causal: bool = False, *, attn_mask: Value | None = None, scale: Any = None
) -> tuple[Value, Value]:
    if fraction(dropout):
        raise Undescribed("attention with dropout")
    raised = c.exp(_scores(c, q, k, causal, attn_mask, scale))
    total = c.sum(raised, [3], keep=True)
    y = c.einsum(["bhst", "bhtd"], "bhsd", c.div(raised, total), v)
    return y, c.log(c.reshape(total, total.shape[:3]))


@row("aten._scaled_dot_product_flash_attention_for_cpu_backward.default", means="the gradients of attention", needs="no dropout")
def flash_backward(
    c: Call, g: Value, q: Value, k: Value, v: Value, y: Value, total: Value, dropout: Any, causal: bool, *,
    attn_mask: Value | None = None, scale: Any = None,
) -> tuple[Value, Value, Value]:  # fmt: skip
    if fraction(dropout):
        raise Undescribed("attention with dropout")
    scores = _scores(c, q, k, causal, attn_mask, scale)
    p = c.exp(c.sub(scores, c.reshape(total, [*total.shape, 1])))
    factor = scale if scale is not None else _default_scale(c.size(q, 3))
    dv = c.einsum(["bhst", "bhsd"], "bhtd", p, g)
    dp = c.einsum(["bhsd", "bhtd"], "bhst", g, v)
    along = c.sum(c.mul(g, y), [3], keep=True)
    ds = c.scale(c.mul(p, c.sub(dp, along)), factor)
    return c.einsum(["bhst", "bhtd"], "bhsd", ds, k), c.einsum(["bhst", "bhsd"], "bhtd", ds, q), dv
