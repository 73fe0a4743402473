"""Softmax and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphguard.engine.algebra.infinities import may_hold_infinity
from graphguard.engine.store.table import Table
from graphguard.engine.tensors.ops import fraction
from graphguard.engine.terms.lane import equal, everywhere
from graphguard.engine.terms.term import STEP, Index, Term, Undescribed, Value, bounds, combined
from graphguard.lemmas.registry import Call, row


@row("aten._softmax.default", means="exp(x) / Σ exp(x)")
def softmax(c: Call, x: Value, dim: int, half_to_float: bool = False) -> Value:
    return _softmax(c, x, dim, safe=False)


@row("aten._safe_softmax.default", means="exp(x) / Σ exp(x), and 0 where all of x is -inf")
def safe_softmax(c: Call, x: Value, dim: int, dtype: Any = None) -> Value:
    return _softmax(c, x, dim, safe=True)


def _softmax(c: Call, x: Value, dim: int, safe: bool) -> Value:
    if not x.shape:
        return c.ones(())
    dim %= len(x.shape)
    raised = c.exp(x)
    return _normed(c, raised, c.sum(raised, [dim], keep=True), dim, safe)


def _normed(c: Call, raised: Value, total: Value, dim: int, safe: bool) -> Value:
    """Rows divided by their sums. `safe`: a row of zeros, which is masked altogether, stays what it is."""
    if safe and not _has_an_element(c.table, raised, dim):
        return c.mul(raised, c.fn("inverse_or_zero", total))
    return c.div(raised, total)


def _has_an_element(table: Table, raised: Value, dim: int) -> bool:
    """Whether each row along a dim is known to have an element above zero."""
    if len(raised.terms) != 1:
        return False
    (term,) = raised.terms
    whole = all(
        equal(low, 0) and equal(high, size)
        for d, ((low, high), size) in enumerate(zip(term.box, raised.shape, strict=True))
        if d != dim
    )
    if not whole or term.coefficient <= 0 or not everywhere(term.weight > 0):
        return False
    masks = [f for f in term.factors if f.atom is STEP]
    others = [f.atom for f in term.factors if f.atom is not STEP]
    if not all(atom.positive and not may_hold_infinity(table, atom) for atom in others) or len(masks) > 1 or term.summed:
        return False
    return not masks or _somewhere_above(term, masks[0].at[0], term.dims[dim])


def _somewhere_above(term: Term, index: Index, row: Sequence[int]) -> bool:
    """Whether a position is above 0 somewhere along a row, for each of the rows."""
    best = [Index(tuple(t for t in index.terms if t[0] not in row), index.offset)]
    for variable, stride in index.terms:
        if variable in row:
            low, high = term.ranges[variable]
            best.append(Index((), stride * (high - 1 if stride > 0 else low)))
    return everywhere(bounds(combined(best), term.ranges)[0] > 0)


@row("aten._softmax_backward_data.default", means="y (g - Σ g y)")
def softmax_backward(c: Call, g: Value, y: Value, dim: int, *_: Any) -> Value:
    product = c.mul(g, y)
    return c.sub(product, c.mul(y, c.sum(product, [dim % len(y.shape)], keep=True) if y.shape else product))


@row("aten._log_softmax.default", means="x - log Σ exp(x)")
def log_softmax(c: Call, x: Value, dim: int, half_to_float: bool = False) -> Value:
    if not x.shape:
        return c.zeros(())
    return c.sub(x, c.log(c.sum(c.exp(x), [dim % len(x.shape)], keep=True)))


@row("aten._log_softmax_backward_data.default", means="g - exp(y) Σ g")
def log_softmax_backward(c: Call, g: Value, y: Value, dim: int, *_: Any) -> Value:
    return c.sub(g, c.mul(c.exp(y), c.sum(g, [dim % len(y.shape)], keep=True) if y.shape else g))


def _scores(c: Call, q: Value, k: Value, causal: bool, mask: Value | None, scale: Any) -> Value:
    scores = c.scale(c.einsum(["bhsd", "bhtd"], "bhst", q, k), _scale(c, q, scale))
    if mask is not None:
        scores = c.add(scores, mask)
    if causal:
        rows, columns = c.size(q, 2), c.size(k, 2)
        above = c.compare("gt", c.arange(columns), c.reshape(c.arange(rows), [rows, 1]), whole=True)
        scores = c.choose(above, float("-inf"), scores)
    return scores


def _scale(c: Call, q: Value, scale: Any) -> Any:
    return float(c.size(q, 3) ** -0.5) if scale is None else scale


def _require_plain(dropout: Any) -> None:
    if fraction(dropout):
        raise Undescribed("attention with dropout")


@row(
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    means="softmax(scale q kᵀ + mask) v, and log Σ exp",
    needs="no dropout",
)
def flash(
    c: Call, q: Value, k: Value, v: Value, dropout: Any = 0.0, causal: bool = False, *, attn_mask: Value | None = None,
    scale: Any = None,
) -> tuple[Value, Value]:  # fmt: skip
    _require_plain(dropout)
    raised = c.exp(_scores(c, q, k, causal, attn_mask, scale))
    total = c.sum(raised, [3], keep=True)
    y = c.einsum(["bhst", "bhtd"], "bhsd", _normed(c, raised, total, 3, safe=True), v)
    return y, c.log(c.reshape(total, total.shape[:3]))


@row(
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default", means="the gradients of attention", needs="no dropout"
)
def flash_backward(
    c: Call, g: Value, q: Value, k: Value, v: Value, y: Value, total: Value, dropout: Any, causal: bool, *,
    attn_mask: Value | None = None, scale: Any = None,
) -> tuple[Value, Value, Value]:  # fmt: skip
    _require_plain(dropout)
    scores = _scores(c, q, k, causal, attn_mask, scale)
    p = c.exp(c.sub(scores, c.reshape(total, [*total.shape, 1])))
    dv = c.einsum(["bhst", "bhsd"], "bhtd", p, g)
    dp = c.einsum(["bhsd", "bhtd"], "bhst", g, v)
    along = c.sum(c.mul(g, y), [3], keep=True)
    ds = c.scale(c.mul(p, c.sub(dp, along)), _scale(c, q, scale))
    return c.einsum(["bhst", "bhtd"], "bhsd", ds, k), c.einsum(["bhst", "bhsd"], "bhtd", ds, q), dv
