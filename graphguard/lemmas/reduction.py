"""Reductions over dims."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from graphguard.engine.term import Undescribed, Value
from graphguard.lemmas.registry import Call, row


def dims_of(dims: Any, rank: int) -> list[int]:
    """What torch means by a dim, dims, or none."""
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return list(range(rank))
    listed = dims if isinstance(dims, (tuple, list)) else (dims,)
    return sorted({d % rank if rank else 0 for d in listed})


@row("aten.sum.default", means="the sum of all elements")
def sum_all(c: Call, x: Value, **_: Any) -> Value:
    return c.sum(x)


@row("aten.sum.dim_IntList", means="the sum over dims")
def sum_dims(c: Call, x: Value, dims: Any = None, keep: bool = False, **_: Any) -> Value:
    return c.sum(x, dims_of(dims, len(x.shape)), keep) if x.shape else x


@row("aten.mean.default", means="the sum of all elements / their number")
def mean_all(c: Call, x: Value, **_: Any) -> Value:
    return c.mean(x)


@row("aten.mean.dim", means="the sum over dims / the number of elements")
def mean_dims(c: Call, x: Value, dims: Any = None, keep: bool = False, **_: Any) -> Value:
    return c.mean(x, dims_of(dims, len(x.shape)), keep) if x.shape else x


@row("aten.amax.default", means="the largest element over dims")
def amax(c: Call, x: Value, dims: Sequence[int] = (), keep: bool = False) -> Value:
    return c.max(x, dims_of(dims, len(x.shape)), keep) if x.shape else x


@row("aten.max.default", means="the largest element")
def max_all(c: Call, x: Value) -> Value:
    return c.max(x, range(len(x.shape))) if x.shape else x


@row("aten.max.dim", means="the largest element over a dim, and where it is", needs="of its position nothing more is known")
def max_dim(c: Call, x: Value, dim: int, keep: bool = False) -> tuple[Value, Any]:
    dim %= len(x.shape)
    largest = c.max(x, [dim], keep)
    return largest, along(c, "argmax", x, dim, keep)


def along(c: Call, name: str, x: Value, dim: int, keep: bool) -> Value:
    """An operator that needs a dim whole and takes it away."""
    order = [d for d in range(len(x.shape)) if d != dim] + [dim]
    found = c.opaque(name, [c.permute(x, order)], len(x.shape) - 1, (), ())
    return c.reshape(found, [*found.shape[:dim], 1, *found.shape[dim:]]) if keep else found


@row("aten.argmax.default", means="the position of the largest element")
def argmax(c: Call, x: Value, dim: int | None = None, keep: bool = False) -> Value:
    if dim is None:
        raise Undescribed("argmax of a flattened tensor")
    return along(c, "argmax", x, dim % len(x.shape), keep)


@row("aten.linalg_vector_norm.default", means="(Σ |x|^p)^(1/p)", needs="p = 2, or the largest |x|")
def vector_norm(c: Call, x: Value, order: Any = 2, dims: Any = None, keep: bool = False, **_: Any) -> Value:
    over = dims_of(dims, len(x.shape))
    if order == 2:
        return c.power(c.sum(c.power(x, 2), over, keep), Fraction(1, 2))
    if order == float("inf"):
        return c.max(c.fn("abs", x), over, keep)
    if order == 1:
        return c.sum(c.fn("abs", x), over, keep)
    raise Undescribed(f"a norm of order {order}")


@row("aten.norm.Scalar", "aten._foreach_norm.Scalar", means="(Σ |x|^p)^(1/p)", needs="p = 2")
def norm(c: Call, x: Value, order: Any = 2, **_: Any) -> Value:
    return vector_norm(c, x, order)


@row("aten.var.correction", means="Σ (x - mean)² / (n - correction)")
def var(c: Call, x: Value, dims: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Value:
    over = dims_of(dims, len(x.shape))
    count = 1
    for dim in over:
        count *= c.size(x, dim)
    centred = c.sub(x, c.mean(x, over, keep=True))
    return c.scale(c.sum(c.power(centred, 2), over, keepdim), Fraction(1, count - int(1 if correction is None else correction)))


@row("aten.var_mean.correction", means="the variance and the mean")
def var_mean(c: Call, x: Value, dims: Any = None, *, correction: Any = 1, keepdim: bool = False) -> tuple[Value, Value]:
    return var(c, x, dims, correction=correction, keepdim=keepdim), c.mean(x, dims_of(dims, len(x.shape)), keepdim)


@row("aten.cumsum.default", means="Σ_j [j <= i] x_j")
def cumsum(c: Call, x: Value, dim: int, **_: Any) -> Value:
    dim %= len(x.shape)
    size = c.size(x, dim)
    mask = c.compare("le", c.arange(size), c.reshape(c.arange(size), [size, 1]), whole=True)
    labels = "abcdefghij"[: len(x.shape)]
    result = labels[:dim] + "z" + labels[dim + 1 :]
    return c.einsum([labels, "z" + labels[dim]], result, x, mask)


@row("aten.logsumexp.default", means="log Σ exp(x)")
def logsumexp(c: Call, x: Value, dims: Any, keep: bool = False) -> Value:
    return c.log(c.sum(c.exp(x), dims_of(dims, len(x.shape)), keep))
