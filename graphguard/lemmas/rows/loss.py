"""Losses and their gradients."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from graphguard.engine.algebra.function import is_constant
from graphguard.engine.algebra.grid import in_cells
from graphguard.engine.store.ranges import Numbers, lies_in, numbers_in
from graphguard.engine.tensors.ops import fraction
from graphguard.engine.terms.lane import varies
from graphguard.engine.terms.term import Factor, Term, Undescribed, Value, extent
from graphguard.graph.labels import IGNORED
from graphguard.lemmas.registry import Call, row
from graphguard.lemmas.rows.positions import the_factor
from graphguard.lemmas.rows.reduction import count_of
from graphguard.lemmas.spans import span_of

NONE, MEAN, SUM = 0, 1, 2


def _reduced(c: Call, each: Value, reduction: int) -> Value:
    return each if reduction == NONE else c.mean(each) if reduction == MEAN else c.sum(each)


def _arriving(c: Call, g: Value, like: Value, reduction: int) -> Value:
    """The gradient that arrives at each element of a reduced loss."""
    if reduction == NONE:
        return g
    count = count_of(c, like, range(len(like.shape)))
    return c.scale(c.expand(g, like.shape), Fraction(1, count) if reduction == MEAN else 1)


def _distance(c: Call, x: Value, y: Value) -> Value:
    return c.atomic(c.sub(x, y))


@row("aten.mse_loss.default", means="(x - y)², reduced")
def mse(c: Call, x: Value, y: Value, reduction: int = MEAN) -> Value:
    return _reduced(c, c.power(_distance(c, x, y), 2), reduction)


@row("aten.mse_loss_backward.default", means="2 g (x - y)")
def mse_backward(c: Call, g: Value, x: Value, y: Value, reduction: int) -> Value:
    return c.scale(c.mul(_arriving(c, g, x, reduction), _distance(c, x, y)), 2)


def _is_near(c: Call, distance: Value, width: Any) -> Value:
    """1 where a loss is quadratic."""
    name = "le" if "huber" in c.node.op else "lt"
    return c.compare(name, c.fn("abs", distance), c.full((), width), whole=False)


@row("aten.smooth_l1_loss.default", "aten.huber_loss.default",
     means="d² / 2w where d = x - y is smaller than w, else |d| - w/2; huber is w times that; reduced")  # fmt: skip
def smooth_l1(c: Call, x: Value, y: Value, reduction: int = MEAN, width: Any = 1) -> Value:
    d, w = _distance(c, x, y), fraction(width)
    far = c.sub(c.fn("abs", d), c.full((), w / 2))
    each = far if not w else c.choose(_is_near(c, d, w), c.scale(c.power(d, 2), 1 / (2 * w)), far)
    return _reduced(c, c.scale(each, w) if "huber" in c.node.op else each, reduction)


@row("aten.smooth_l1_loss_backward.default", "aten.huber_loss_backward.default", means="g times the slope of the loss")
def smooth_l1_backward(c: Call, g: Value, x: Value, y: Value, reduction: int, width: Any) -> Value:
    d, w = _distance(c, x, y), fraction(width)
    far = c.fn("sign", d)
    slope = far if not w else c.choose(_is_near(c, d, w), c.scale(d, 1 / w), far)
    return c.mul(_arriving(c, g, x, reduction), c.scale(slope, w) if "huber" in c.node.op else slope)


@row("aten.binary_cross_entropy.default", means="-w (y max(log x, -100) + (1 - y) max(log(1 - x), -100)), reduced")
def bce(c: Call, x: Value, y: Value, weight: Value | None = None, reduction: int = MEAN) -> Value:
    one = c.ones(())
    logs = [c.fn("clamp", c.log(each), parameters=(Fraction(-100), None)) for each in (x, c.sub(one, x))]
    each = c.neg(c.add(c.mul(y, logs[0]), c.mul(c.sub(c.ones(y.shape), y), logs[1])))
    return _reduced(c, each if weight is None else c.mul(each, weight), reduction)


@row("aten.binary_cross_entropy_backward.default", means="g w (x - y) / max(x (1 - x), 1e-12)")
def bce_backward(c: Call, g: Value, x: Value, y: Value, weight: Value | None = None, reduction: int = MEAN) -> Value:
    product = c.mul(x, c.sub(c.ones(x.shape), x))
    below = c.fn("clamp", product, parameters=(Fraction(1, 10**12), None))
    slope = c.mul(_arriving(c, g, x, reduction), c.div(_distance(c, x, y), below))
    return slope if weight is None else c.mul(slope, weight)


@row("aten.binary_cross_entropy_with_logits.default", means="w ((1 - y) x + (1 + (p - 1) y) log(1 + exp(-x))), reduced")
def bce_with_logits(
    c: Call, x: Value, y: Value, weight: Value | None = None, positive: Value | None = None, reduction: int = MEAN
) -> Value:
    one = c.ones(x.shape)
    soft = c.log(c.add(one, c.exp(c.neg(x))))
    if positive is not None:
        soft = c.mul(soft, c.add(one, c.mul(y, c.sub(positive, c.ones(())))))
    each = c.add(c.mul(c.sub(one, y), x), soft)
    return _reduced(c, each if weight is None else c.mul(each, weight), reduction)


# ---------------------------------------------------------------------- classes
def _kept(c: Call, target: Value, ignored: int) -> Value | None:
    """1 for targets that count; None if all do."""
    keep = c.compare("ne", target, c.full(target.shape, ignored), whole=True)
    return None if is_constant(keep) == 1 else keep


def _classes(c: Call, target: Value, size: int, ignored: int) -> Value:
    """[target = v] along a new last dim; a row of zeros for a target that is ignored.

    In the sequential program a target is a class, or it is ignored; of the ranks that has to be known."""
    ignores = ignored != IGNORED or c.table.ignores_by_default
    for _, terms in in_cells(c.table, c.atomic(target)):
        factor = the_factor(terms)
        declared = None if factor is None else c.table.facts.numbers(factor, terms[0].ranges)
        stated = any(low <= ignored < high for low, high in declared or ())
        spans = [(0, size), *([(ignored, ignored + 1)] if ignores or stated else [])]
        if c.table.recording and factor is not None:
            c.table.facts.infer(factor, terms[0].ranges, spans)
        elif not c.table.recording and not _lies_in(c, factor, terms, numbers_in(spans)):
            raise Undescribed("a target that may be none of the classes")
    return c.one_hot(target, size, len(target.shape))


def _lies_in(c: Call, factor: Factor | None, terms: list[Term], numbers: Numbers) -> bool:
    """Whether terms on the same elements are some of these numbers."""
    known = None if factor is None else c.table.facts.numbers(factor, terms[0].ranges)
    if known is None:
        box = terms[0].box if terms else ()
        here = tuple((0, extent(span)) for span in box)
        span = span_of(c.table, Value(tuple(size for _, size in here), tuple(term.with_(box=here) for term in terms)))
        if span is None:
            return False
        lanes = zip(*np.broadcast_arrays(*span), strict=True) if varies(span[0]) or varies(span[1]) else [span]
        return all(lies_in(((int(low), int(high) + 1),), numbers) for low, high in lanes)
    return lies_in(known, numbers)


def _last_classes(c: Call, x: Value) -> Value:
    """[batch, classes, ...] with the classes last."""
    return x if len(x.shape) < 3 else c.permute(x, [0, *range(2, len(x.shape)), 1])


@row("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default",
     means="-Σ_v [t = v] w[v] x[v], reduced, and the weight of the targets that count")  # fmt: skip
def nll(c: Call, x: Value, target: Value, weight: Value | None, reduction: int, ignored: int) -> tuple[Value, Value]:
    x = _last_classes(c, x)
    hot = _classes(c, target, c.size(x, len(x.shape) - 1), ignored)
    keep = _kept(c, target, ignored)
    lead = "abcdef"[: len(target.shape)]
    if weight is None:
        each = c.neg(c.selected([f"{lead}v", f"{lead}v"], lead, x, hot))
        counted = c.ones(target.shape) if keep is None else keep
    else:
        each = c.neg(c.selected([f"{lead}v", f"{lead}v", "v"], lead, x, hot, weight))
        counted = c.selected([f"{lead}v", "v"], lead, hot, weight)
        counted = counted if keep is None else c.mul(counted, keep)
    if keep is not None:
        each = c.mul(each, keep)
    if reduction == NONE:
        return each, c.zeros(()) if target.shape else counted
    total, count = c.sum(each), c.sum(counted)
    return (c.div(total, count) if reduction == MEAN else total), count


@row("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default", means="-g [t = v] w[v] / count")
def nll_backward(
    c: Call, g: Value, x: Value, target: Value, weight: Value | None, reduction: int, ignored: int, count: Value
) -> Value:
    rank = len(x.shape)
    hot = _classes(c, target, c.size(x, 0 if rank == 1 else 1), ignored)
    keep = _kept(c, target, ignored)
    slope = c.div(c.neg(g), count) if reduction == MEAN else c.neg(g)
    slope = c.expand(slope, target.shape)
    slope = slope if keep is None else c.mul(slope, keep)
    lead = "abcdef"[: len(target.shape)]
    names, values = [f"{lead}v", lead], [hot, slope]
    if weight is not None:
        names, values = [*names, "v"], [*values, weight]
    grad = c.selected(names, f"{lead}v", *values)
    return grad if rank < 3 else c.permute(grad, [0, rank - 1, *range(1, rank - 1)])
