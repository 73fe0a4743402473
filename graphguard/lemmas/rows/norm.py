"""Normalisations and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from graphguard.engine.tensors.ops import fraction
from graphguard.engine.terms.term import Undescribed, Value
from graphguard.lemmas.registry import Call, row
from graphguard.lemmas.rows.reduction import count_of

HALF = Fraction(1, 2)


def _asked(*gradients: Value | None) -> tuple[Value, ...]:
    """Gradients that nobody asked for are not outputs."""
    return tuple(gradient for gradient in gradients if gradient is not None)


def _statistics(c: Call, x: Value, over: Sequence[int], eps: Any) -> tuple[Value, Value, Value]:
    """x without its mean; the mean; one over the root of the variance."""
    mean = c.mean(x, over, keep=True)
    centred = c.atomic(c.sub(x, mean))
    variance = c.mean(c.power(centred, 2), over, keep=True)
    return centred, mean, c.power(c.add(variance, c.full((), eps)), -HALF)


def _slope(c: Call, g: Value, normed: Value, rstd: Value, over: Sequence[int]) -> Value:
    """The gradient through (x - mean) rstd, where g arrives."""
    inner = c.sub(g, c.mean(g, over, keep=True))
    return c.mul(c.sub(inner, c.mul(normed, c.mean(c.mul(g, normed), over, keep=True))), rstd)


@row("aten.native_layer_norm.default", means="(x - mean) rstd w + b, with mean and rstd over the last dims")
def layer_norm(
    c: Call, x: Value, shape: Sequence[int], w: Value | None, b: Value | None, eps: Any
) -> tuple[Value, Value, Value]:
    over = list(range(len(x.shape) - len(shape), len(x.shape)))
    centred, mean, rstd = _statistics(c, x, over, eps)
    y = c.mul(centred, rstd)
    y = y if w is None else c.mul(y, w)
    return (y if b is None else c.add(y, b)), mean, rstd


@row("aten.native_layer_norm_backward.default", means="the gradients of layer_norm")
def layer_norm_backward(
    c: Call,
    g: Value,
    x: Value,
    shape: Sequence[int],
    mean: Value,
    rstd: Value,
    w: Value | None,
    b: Value | None,
    asked: Sequence[bool],
) -> tuple[Value, ...]:
    rank = len(x.shape)
    over = list(range(rank - len(shape), rank))
    rest = list(range(rank - len(shape)))
    normed = c.mul(c.atomic(c.sub(x, mean)), rstd)
    dx = _slope(c, g if w is None else c.mul(g, w), normed, rstd, over) if asked[0] else None
    dw = c.sum(c.mul(g, normed), rest) if asked[1] and w is not None else None
    return _asked(dx, dw, c.sum(g, rest) if asked[2] and b is not None else None)


# ---------------------------------------------------------------------- groups of channels
def _grouped(c: Call, x: Value, groups: int) -> Value:
    """[batch, groups, all else]."""
    batch = c.size(x, 0)
    return c.reshape(x, [batch, groups, count_of(c, x, range(1, len(x.shape))) // groups])


def _channels(c: Call, w: Value, x: Value) -> Value:
    """One number per channel of x. Some kernels read past the end of a shorter tensor, without a word."""
    if c.size(w, 0) != c.size(x, 1):
        raise Undescribed("channels of another number than the numbers for them")
    return c.reshape(w, [c.size(w, 0), *[1] * (len(x.shape) - 2)])


@row("aten.native_group_norm.default", means="(x - mean) rstd w + b, with mean and rstd over groups of channels")
def group_norm(
    c: Call, x: Value, w: Value | None, b: Value | None, n: int, channels: int, inner: int, groups: int, eps: Any
) -> tuple[Value, Value, Value]:
    centred, mean, rstd = _statistics(c, _grouped(c, x, groups), [2], eps)
    y = c.reshape(c.mul(centred, rstd), x.shape)
    y = y if w is None else c.mul(y, _channels(c, w, x))
    y = y if b is None else c.add(y, _channels(c, b, x))
    return y, c.reshape(mean, mean.shape[:2]), c.reshape(rstd, rstd.shape[:2])


@row("aten.native_group_norm_backward.default", means="the gradients of group_norm")
def group_norm_backward(
    c: Call, g: Value, x: Value, mean: Value, rstd: Value, w: Value | None, n: int, channels: int, inner: int, groups: int,
    asked: Sequence[bool],
) -> tuple[Value, ...]:  # fmt: skip
    mean, rstd = c.reshape(mean, [*mean.shape, 1]), c.reshape(rstd, [*rstd.shape, 1])
    normed = c.mul(c.atomic(c.sub(_grouped(c, x, groups), mean)), rstd)
    rest = [d for d in range(len(x.shape)) if d != 1]
    dx = None
    if asked[0]:
        scaled = g if w is None else c.mul(g, _channels(c, w, x))
        dx = c.reshape(_slope(c, _grouped(c, scaled, groups), normed, rstd, [2]), x.shape)
    dw = c.sum(c.mul(g, c.reshape(normed, x.shape)), rest) if asked[1] else None
    return _asked(dx, dw, c.sum(g, rest) if asked[2] else None)


# ---------------------------------------------------------------------- batches
def _batch_statistics(c: Call, x: Value, eps: Any) -> tuple[Value, Value, Value, Value]:
    over = [d for d in range(len(x.shape)) if d != 1]
    centred, mean, rstd = _statistics(c, x, over, eps)
    variance = c.mean(c.power(centred, 2), over)
    channels = [c.size(x, 1)]
    return c.mul(centred, rstd), c.reshape(mean, channels), c.reshape(rstd, channels), variance


def _affine(c: Call, y: Value, w: Value | None, b: Value | None) -> Value:
    y = y if w is None else c.mul(y, _channels(c, w, y))
    return y if b is None else c.add(y, _channels(c, b, y))


@row(
    "aten._native_batch_norm_legit.default", means="(x - mean) rstd w + b over the batch; running statistics", needs="training"
)
def batch_norm_training(
    c: Call, x: Value, w: Value | None, b: Value | None, mean: Value, variance: Value, training: bool, momentum: Any, eps: Any
) -> tuple[Value, ...]:
    if not training:
        raise Undescribed("a batch norm that writes nothing")
    normed, now, rstd, spread = _batch_statistics(c, x, eps)
    count = count_of(c, x, [d for d in range(len(x.shape)) if d != 1])
    if count < 2:
        raise Undescribed("a variance of one element")
    rate = fraction(momentum)
    new_mean = c.add(c.scale(mean, 1 - rate), c.scale(now, rate))
    new_variance = c.add(c.scale(variance, 1 - rate), c.scale(spread, rate * Fraction(count, count - 1)))
    return new_mean, new_variance, _affine(c, normed, w, b), now, rstd


@row(
    "aten.native_batch_norm.default",
    "aten._native_batch_norm_legit.no_stats",
    "aten._native_batch_norm_legit_no_training.default",
    means="(x - mean) rstd w + b, over the batch or with running statistics",
)
def batch_norm(c: Call, x: Value, w: Value | None, b: Value | None, *args: Any) -> tuple[Any, ...]:
    *statistics, _, eps = args
    if "no_training" in c.node.op:
        statistics.append(False)
    if statistics[-1]:
        if len(statistics) == 3 and statistics[0] is not None:
            raise Undescribed("running statistics that are written without notice")
        normed, mean, rstd, _ = _batch_statistics(c, x, eps)
        return _affine(c, normed, w, b), mean, rstd
    mean, variance = (_channels(c, each, x) for each in statistics[:2])
    normed = c.mul(c.atomic(c.sub(x, mean)), c.power(c.add(variance, c.full((), eps)), -HALF))
    # What stands for statistics of the batch depends on the backend, and nothing reads it.
    saved = [c.opaque("batch_norm_saved", [c.ones(())], 0, each.shape, (n,)) for n, each in enumerate(c.node.outputs[1:])]
    return _affine(c, normed, w, b), *saved


@row("aten.native_batch_norm_backward.default", means="the gradients of batch_norm")
def batch_norm_backward(
    c: Call, g: Value, x: Value, w: Value | None, running_mean: Value | None, running_variance: Value | None,
    mean: Value | None, rstd: Value | None, training: bool, eps: Any, asked: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    rank = len(x.shape)
    over = [d for d in range(rank) if d != 1]
    if not training:
        if running_mean is None or running_variance is None:
            raise Undescribed("a batch norm without statistics")
        mean, rstd = running_mean, c.power(c.add(running_variance, c.full((), eps)), -HALF)
    if mean is None or rstd is None:
        raise Undescribed("a batch norm without statistics")
    mean, rstd = _channels(c, mean, x), _channels(c, rstd, x)
    normed = c.mul(c.atomic(c.sub(x, mean)), rstd)
    dx = None
    if asked[0]:
        scaled = g if w is None else c.mul(g, _channels(c, w, x))
        dx = _slope(c, scaled, normed, rstd, over) if training else c.mul(scaled, rstd)
    return dx, *_asked(c.sum(c.mul(g, normed), over) if asked[1] else None, c.sum(g, over) if asked[2] else None)
