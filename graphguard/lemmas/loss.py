"""Losses and their gradients."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from graphguard.engine.term import Undescribed, Value
from graphguard.lemmas.index import declare
from graphguard.lemmas.registry import Call, row

NONE, MEAN, SUM = 0, 1, 2


def _reduced(c: Call, each: Value, reduction: int) -> Value:
    return each if reduction == NONE else c.mean(each) if reduction == MEAN else c.sum(each)


def _slope(c: Call, g: Value, like: Value, reduction: int) -> Value:
    """The gradient that arrives at each element of a reduced loss."""
    if reduction == NONE:
        return g
    count = 1
    for dim in range(len(like.shape)):
        count *= c.size(like, dim)
    return c.scale(c.expand(g, like.shape), Fraction(1, count) if reduction == MEAN else 1)


@row("aten.mse_loss.default", means="(x - y)², reduced")
def mse(c: Call, x: Value, y: Value, reduction: int = MEAN) -> Value:
    return _reduced(c, c.power(c.atomic(c.sub(x, y)), 2), reduction)


@row("aten.mse_loss_backward.default", means="2 g (x - y)")
def mse_backward(c: Call, g: Value, x: Value, y: Value, reduction: int) -> Value:
    return c.scale(c.mul(_slope(c, g, x, reduction), c.atomic(c.sub(x, y))), 2)


def _kept(c: Call, target: Value, ignored: int) -> Value | None:
    """1 for targets that count; None if all do."""
    keep = c.compare("ne", target, c.full(target.shape, ignored), whole=True)
    from graphguard.engine.function import is_constant

    return None if is_constant(keep) == 1 else keep


@row("aten.nll_loss_forward.default", means="-Σ_v [t = v] x[v], reduced, and the number of targets that count", needs="no weights")
def nll(c: Call, x: Value, target: Value, weight: Value | None, reduction: int, ignored: int) -> tuple[Value, Value]:
    if weight is not None:
        raise Undescribed("a loss with weights for classes")
    declare(c, target, c.size(x, len(x.shape) - 1))
    keep = _kept(c, target, ignored)
    lead = "abc"[: len(target.shape)]
    each = c.neg(c.einsum([f"{lead}v", f"{lead}v"], lead, x, c.one_hot(target, c.size(x, len(x.shape) - 1), len(target.shape))))
    if keep is not None:
        each = c.mul(each, keep)
    count = c.full((), c.size(target, 0) if target.shape else 1) if keep is None else c.sum(keep)
    if reduction == NONE:
        return each, count
    total = c.sum(each)
    return (c.div(total, count) if reduction == MEAN else total), count


@row("aten.nll_loss_backward.default", means="-g [t = v] / count", needs="no weights")
def nll_backward(
    c: Call, g: Value, x: Value, target: Value, weight: Value | None, reduction: int, ignored: int, count: Value
) -> Value:
    if weight is not None:
        raise Undescribed("a loss with weights for classes")
    declare(c, target, c.size(x, len(x.shape) - 1))
    keep = _kept(c, target, ignored)
    hot = c.one_hot(target, c.size(x, len(x.shape) - 1), len(target.shape))
    slope = c.neg(g)
    if reduction == MEAN:
        slope = c.div(slope, count)
    if keep is not None:
        slope = c.mul(c.expand(slope, keep.shape), keep)
    if reduction == NONE or keep is not None:
        slope = c.reshape(slope, [*slope.shape, 1])
    return c.mul(hot, slope) if reduction == NONE or keep is not None else c.mul(hot, c.expand(slope, hot.shape))


