"""Reductions over dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from graphguard.engine.tensors.ops import fraction
from graphguard.engine.terms.term import Undescribed, Value
from graphguard.lemmas.registry import Call, row
from graphguard.lemmas.rows.mask import truth


def dims_of(dims: Any, rank: int) -> list[int]:
    """What torch means by a dim, dims, or none."""
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return list(range(rank))
    listed = dims if isinstance(dims, (tuple, list)) else (dims,)
    return sorted({d % rank for d in listed}) if rank else []


def count_of(c: Call, x: Value, dims: Sequence[int]) -> int:
    return math.prod(c.size(x, dim) for dim in dims)


@row("aten.sum.default", means="the sum of all elements", complex=True)
def sum_all(c: Call, x: Value, *, dtype: Any = None) -> Value:
    return c.sum(c.to_dtype(x, 0, dtype), range(c.rank()))


@row("aten.sum.dim_IntList", means="the sum over dims", complex=True)
def sum_dims(c: Call, x: Value, dims: Any = None, keep: bool = False, *, dtype: Any = None) -> Value:
    return c.sum(c.to_dtype(x, 0, dtype), dims_of(dims, c.rank()), keep)


@row("aten.mean.default", means="the sum of all elements / their number", complex=True)
def mean_all(c: Call, x: Value, *, dtype: Any = None) -> Value:
    return c.mean(c.to_dtype(x, 0, dtype), range(c.rank()))


@row("aten.mean.dim", means="the sum over dims / the number of elements", complex=True)
def mean_dims(c: Call, x: Value, dims: Any = None, keep: bool = False, *, dtype: Any = None) -> Value:
    return c.mean(c.to_dtype(x, 0, dtype), dims_of(dims, c.rank()), keep)


def smallest(c: Call, x: Value, dims: Sequence[int], keep: bool = False) -> Value:
    return c.neg(c.max(c.neg(x), dims, keep)) if dims else x


def largest(c: Call, x: Value, dims: Sequence[int], keep: bool = False) -> Value:
    return c.max(x, dims, keep) if dims else x


@row("aten.amax.default", means="the largest element over dims")
def amax(c: Call, x: Value, dims: Any = (), keep: bool = False) -> Value:
    return largest(c, x, dims_of(dims, len(x.shape)), keep)


@row("aten.amin.default", means="the smallest element over dims")
def amin(c: Call, x: Value, dims: Any = (), keep: bool = False) -> Value:
    return smallest(c, x, dims_of(dims, len(x.shape)), keep)


@row("aten.aminmax.default", means="the smallest and the largest element, of all or over a dim")
def aminmax(c: Call, x: Value, *, dim: Any = None, keepdim: bool = False) -> tuple[Value, Value]:
    dims = dims_of(dim, len(x.shape))
    return smallest(c, x, dims, keepdim), largest(c, x, dims, keepdim)


@row("aten.max.default", means="the largest element")
def max_all(c: Call, x: Value) -> Value:
    return largest(c, x, range(len(x.shape)))


@row("aten.min.default", means="the smallest element")
def min_all(c: Call, x: Value) -> Value:
    return smallest(c, x, range(len(x.shape)))


@row("aten.any.default", "aten.any.dim", "aten.any.dims", means="whether some element is not 0")
def any_(c: Call, x: Value, dims: Any = None, keep: bool = False) -> Value:
    return _some(c, truth(c, x, 0), dims_of(dims, len(x.shape)), keep)


@row("aten.all.default", "aten.all.dim", "aten.all.dims", means="whether no element is 0")
def all_(c: Call, x: Value, dims: Any = None, keep: bool = False) -> Value:
    return c.negate(_some(c, c.negate(truth(c, x, 0)), dims_of(dims, len(x.shape)), keep))


def _some(c: Call, mask: Value, dims: Sequence[int], keep: bool) -> Value:
    return c.fn("positive", c.sum(mask, dims, keep)) if dims else mask


@row("aten.linalg_vector_norm.default", means="(Σ |x|^p)^(1/p)", needs="p = 1, 2, or the largest |x|")
def vector_norm(c: Call, x: Value, order: Any = 2, dims: Any = None, keep: bool = False, *, dtype: Any = None) -> Value:
    over = dims_of(dims, len(x.shape))
    x = c.to_dtype(x, 0, dtype)
    if order == 2:
        return c.power(c.sum(c.power(x, 2), over, keep), Fraction(1, 2))
    if order == 1:
        return c.sum(c.fn("abs", x), over, keep)
    if order == math.inf:
        return largest(c, c.fn("abs", x), over, keep)
    if order == 0:
        return c.sum(c.compare("ne", x, c.zeros(()), whole=False), over, keep)
    raise Undescribed(f"a norm of order {order}")


@row("aten.norm.Scalar", means="(Σ |x|^p)^(1/p)", needs="p = 1, 2, or the largest |x|")
def norm(c: Call, x: Value, order: Any = 2, dtype: Any = None) -> Value:
    return vector_norm(c, x, order, dtype=dtype)


@row("aten.norm.ScalarOpt_dim", means="(Σ |x|^p)^(1/p) over dims", needs="p = 1, 2, or the largest |x|")
def norm_dims(c: Call, x: Value, order: Any, dims: Any, keep: bool = False) -> Value:
    return vector_norm(c, x, 2 if order is None else order, dims, keep)


@row("aten.var.correction", means="Σ (x - mean)² / (n - correction)", needs="more elements than the correction")
def var(c: Call, x: Value, dims: Any = None, *, correction: Any = None, keepdim: bool = False) -> Value:
    over = dims_of(dims, len(x.shape))
    left = count_of(c, x, over) - fraction(1 if correction is None else correction)
    if left <= 0:
        raise Undescribed("a variance of too few elements")
    centred = c.atomic(c.sub(x, c.mean(x, over, keep=True)))
    return c.scale(c.sum(c.power(centred, 2), over, keepdim), 1 / left)


@row("aten.std.correction", means="the root of the variance", needs="more elements than the correction")
def std(c: Call, x: Value, dims: Any = None, *, correction: Any = None, keepdim: bool = False) -> Value:
    return c.power(var(c, x, dims, correction=correction, keepdim=keepdim), Fraction(1, 2))


@row("aten.var_mean.correction", means="the variance and the mean", needs="more elements than the correction")
def var_mean(c: Call, x: Value, dims: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Value, Value]:
    return var(c, x, dims, correction=correction, keepdim=keepdim), c.mean(x, dims_of(dims, len(x.shape)), keepdim)


@row("aten.std_mean.correction", means="the root of the variance, and the mean", needs="more elements than the correction")
def std_mean(c: Call, x: Value, dims: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Value, Value]:
    return std(c, x, dims, correction=correction, keepdim=keepdim), c.mean(x, dims_of(dims, len(x.shape)), keepdim)


@row("aten.cumsum.default", means="Σ_j [j <= i] x_j")
def cumsum(c: Call, x: Value, dim: int, *, dtype: Any = None) -> Value:
    x = c.to_dtype(x, 0, dtype)
    if not x.shape:
        return x
    dim %= len(x.shape)
    size = c.size(x, dim)
    mask = c.compare("le", c.arange(size), c.reshape(c.arange(size), [size, 1]), whole=True)
    labels = "abcdefghij"[: len(x.shape)]
    return c.selected([labels, "z" + labels[dim]], labels[:dim] + "z" + labels[dim + 1 :], x, mask)


@row("aten.logsumexp.default", means="log Σ exp(x)")
def logsumexp(c: Call, x: Value, dims: Any, keep: bool = False) -> Value:
    return c.log(c.sum(c.exp(x), dims_of(dims, len(x.shape)), keep))


@row("aten.trace.default", means="Σ_i x[i, i]")
def trace(c: Call, x: Value) -> Value:
    rows, columns = c.size(x, 0), c.size(x, 1)
    mask = c.compare("eq", c.reshape(c.arange(rows), [rows, 1]), c.arange(columns), whole=True)
    return c.selected(["ab", "ab"], "", x, mask)
