"""Normalisations and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from graphguard.engine.ops import fraction
from graphguard.engine.term import Value
from graphguard.lemmas.registry import Call, row


@row("aten.native_layer_norm.default", means="(x - mean) rstd w + b, with mean and rstd over the last dims")
def layer_norm(c: Call, x: Value, shape: Sequence[int], w: Value | None, b: Value | None, eps: Any) -> tuple[Value, Value, Value]:
    over = list(range(len(x.shape) - len(shape), len(x.shape)))
    mean = c.mean(x, over, keep=True)
    centred = c.atomic(c.sub(x, mean))
    variance = c.mean(c.power(centred, 2), over, keep=True)
    rstd = c.power(c.add(variance, c.full((), eps)), Fraction(-1, 2))
    y = c.mul(centred, rstd)
    y = y if w is None else c.mul(y, w)
    return (y if b is None else c.add(y, b)), mean, rstd


@row("aten.native_layer_norm_backward.default", means="the gradients of layer_norm")
def layer_norm_backward(
    c: Call, g: Value, x: Value, shape: Sequence[int], mean: Value, rstd: Value, w: Value | None, b: Value | None, mask: Sequence[bool]
) -> tuple[Value | None, ...]:
    rank = len(x.shape)
    over = list(range(rank - len(shape), rank))
    rest = [d for d in range(rank) if d not in over]
    normed = c.mul(c.atomic(c.sub(x, mean)), rstd)
    scaled = g if w is None else c.mul(g, w)
    dx = None
    if mask[0]:
        inner = c.sub(scaled, c.mean(scaled, over, keep=True))
        inner = c.sub(inner, c.mul(normed, c.mean(c.mul(scaled, normed), over, keep=True)))
        dx = c.mul(inner, rstd)
    return dx, c.sum(c.mul(g, normed), rest) if mask[1] else None, c.sum(g, rest) if mask[2] else None


@row("aten._fused_rms_norm.default", means="x rstd w, with rstd over the last dims")
def rms_norm(c: Call, x: Value, shape: Sequence[int], w: Value | None, eps: Any) -> tuple[Value, Value]:
    over = list(range(len(x.shape) - len(shape), len(x.shape)))
    number = Fraction(1, 2**23) if eps is None else fraction(eps)
    rstd = c.power(c.add(c.mean(c.power(x, 2), over, keep=True), c.full((), number)), Fraction(-1, 2))
    y = c.mul(x, rstd)
    return (y if w is None else c.mul(y, w)), rstd


@row("aten._fused_rms_norm_backward.default", means="the gradients of rms_norm")
def rms_norm_backward(
    c: Call, g: Value, x: Value, shape: Sequence[int], rstd: Value, w: Value | None, mask: Sequence[bool]
) -> tuple[Value | None, ...]:
    rank = len(x.shape)
    over = list(range(rank - len(shape), rank))
    rest = [d for d in range(rank) if d not in over]
    normed = c.mul(x, rstd)
    scaled = g if w is None else c.mul(g, w)
    dx = None
    if mask[0]:
        dx = c.mul(c.sub(scaled, c.mul(normed, c.mean(c.mul(scaled, normed), over, keep=True))), rstd)
    return dx, c.sum(c.mul(g, normed), rest) if mask[1] else None
