"""Operators that need a dim whole and treat the rows along it alike: equal rows give equal rows, and nothing more is known."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from graphguard.engine.tensors.integer import in_pieces
from graphguard.engine.tensors.known_numbers import numbers_of, row_of
from graphguard.engine.tensors.ops import fraction
from graphguard.engine.terms.lane import equal, varies
from graphguard.engine.terms.term import Undescribed, Value
from graphguard.lemmas.registry import Call, row
from graphguard.lemmas.rows.positions import bounded
from graphguard.lemmas.rows.reduction import largest, smallest


def along(c: Call, name: str, x: Value, dim: int, size: int | None, parameters: Sequence[Hashable] = ()) -> Value:
    """The result has a dim of `size` in place of the one that must be whole, or none."""
    if not x.shape:
        found = along(c, name, c.reshape(x, [1]), 0, size, parameters)
        return c.reshape(found, ())
    order = [d for d in range(len(x.shape)) if d != dim] + [dim]
    found = c.opaque(name, [c.permute(x, order)], len(x.shape) - 1, () if size is None else (size,), tuple(parameters))
    if size is None:
        return found
    last = len(x.shape) - 1
    return c.permute(found, [*range(dim), last, *range(dim, last)])


def without(c: Call, name: str, x: Value, dim: int, keep: bool, parameters: Sequence[Hashable] = ()) -> Value:
    """A dim is taken away, or left with one element."""
    if not x.shape:
        return along(c, name, x, 0, None, parameters)
    found = along(c, name, x, dim % len(x.shape), None, parameters)
    return c.reshape(found, c.node.outputs[0].shape) if keep else found


def where(c: Call, name: str, x: Value, dim: int, keep: bool, parameters: Sequence[Hashable] = ()) -> Value:
    """A position in a dim."""
    return bounded(c, without(c, name, x, dim, keep, parameters), 0, _size(c, x, dim))


def _size(c: Call, x: Value, dim: int) -> int:
    return c.size(x, dim % len(x.shape)) if x.shape else 1


def flat(c: Call, x: Value) -> Value:
    return c.reshape(x, [math.prod(c.size(x, dim) for dim in range(len(x.shape)))])


@row("aten.max.dim", means="the largest element over a dim, and where it is", needs="of its position nothing more is known")
def max_dim(c: Call, x: Value, dim: int, keep: bool = False) -> tuple[Value, Value]:
    over = [dim % len(x.shape)] if x.shape else []
    return largest(c, x, over, keep), where(c, "argmax", x, dim, keep)


@row("aten.min.dim", means="the smallest element over a dim, and where it is", needs="of its position nothing more is known")
def min_dim(c: Call, x: Value, dim: int, keep: bool = False) -> tuple[Value, Value]:
    over = [dim % len(x.shape)] if x.shape else []
    return smallest(c, x, over, keep), where(c, "argmin", x, dim, keep)


@row("aten.argmax.default", "aten.argmin.default", means="the position of the largest or smallest element")
def arg_extreme(c: Call, x: Value, dim: int | None = None, keep: bool = False) -> Value:
    name = c.node.op.split(".")[1]
    if dim is not None:
        return where(c, name, x, dim, keep)
    return c.reshape(where(c, name, flat(c, x), 0, False), c.shape)


@row("aten.sort.default", means="a dim in order, and where its elements were")
def sort(c: Call, x: Value, dim: int = -1, descending: bool = False) -> tuple[Value, Value]:
    return _sorted(c, x, dim, (bool(descending), None))


@row("aten.sort.stable", means="a dim in order, and where its elements were")
def sort_stable(c: Call, x: Value, *, stable: bool | None, dim: int = -1, descending: bool = False) -> tuple[Value, Value]:
    return _sorted(c, x, dim, (bool(descending), stable or None))


def _sorted(c: Call, x: Value, dim: int, parameters: tuple[Hashable, ...]) -> tuple[Value, Value]:
    known = _sorted_numbers(c, x, *parameters)
    if known is not None:
        return known
    size = _size(c, x, dim)
    dim %= max(1, len(x.shape))
    if parameters[1] and is_constant_along(x, dim):  # equal elements stay where they are
        places = c.reshape(c.arange(size), [size if d == dim else 1 for d in range(len(x.shape))])
        return x, c.expand(places, x.shape)
    values = along(c, "sort", x, dim, size, parameters[:1])
    return values, bounded(c, along(c, "argsort", x, dim, size, parameters), 0, size)


def _sorted_numbers(c: Call, x: Value, descending: Hashable, stable: Hashable) -> tuple[Value, Value] | None:
    """A row of known whole numbers in order. Of equal ones it is known which comes first only if the order is stable."""
    found = numbers_of(c, [x]) if len(x.shape) == 1 and x.shape[0] else None
    if found is None or (not stable and any(len(np.unique(row)) < row.size for row in found[0])):
        return None
    orders = [np.argsort(-row if descending else row, kind="stable") for row in found[0]]
    return row_of(c, [row[order] for row, order in zip(found[0], orders, strict=True)]), row_of(c, orders)


@row("aten.topk.default", means="the largest or smallest elements of a dim, and where they are")
def topk(c: Call, x: Value, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> tuple[Value, Value]:
    dim %= max(1, len(x.shape))
    key = (k, bool(largest), bool(ordered))
    return along(c, "topk", x, dim, k, key), bounded(c, along(c, "topk_indices", x, dim, k, key), 0, _size(c, x, dim))


def are_distinct(c: Call, index: Value, dim: int) -> bool:
    """Whether the positions along a dim are known to differ from each other: those that topk or sort found there."""
    if len(index.terms) != 1 or len(index.terms[0].factors) != 1 or in_pieces(index):
        return False
    (term,) = index.terms
    (factor,) = term.factors
    definition = c.table.definitions.get(factor.atom)
    if definition is None or definition.name not in ("topk_indices", "argsort") or factor.power != 1:
        return False
    if term.coefficient != 1 or varies(term.weight) or len(term.dims[dim]) != 1:
        return False
    rows = {variable for position in factor.at[:-1] for variable, _ in position.terms}  # of a diagonal, nothing is known
    return factor.at[-1].terms == ((term.dims[dim][0], 1),) and term.dims[dim][0] not in rows


def is_constant_along(x: Value, dim: int) -> bool:
    """Whether the elements along a dim are known to be equal: no term is in pieces there, and none reads a position in it."""
    if not x.shape:
        return False
    for term in x.terms:
        if not (equal(term.box[dim][0], 0) and equal(term.box[dim][1], x.shape[dim])):
            return False
        if any(variable in term.dims[dim] for factor in term.factors for variable in factor.variables()):
            return False
    return True


@row("aten.kthvalue.default", means="the k-th smallest element of a dim, and where it is")
def kthvalue(c: Call, x: Value, k: int, dim: int = -1, keep: bool = False) -> tuple[Value, Value]:
    return without(c, "kthvalue", x, dim, keep, (k,)), where(c, "kthvalue_index", x, dim, keep, (k,))


@row("aten.median.dim", "aten.mode.default", means="the middle or the most frequent element of a dim, and where it is")
def median(c: Call, x: Value, dim: int = -1, keep: bool = False) -> tuple[Value, Value]:
    name = c.node.op.split(".")[1]
    return without(c, name, x, dim, keep), where(c, f"{name}_index", x, dim, keep)


@row("aten.median.default", means="the middle element")
def median_all(c: Call, x: Value) -> Value:
    return without(c, "median", flat(c, x), 0, False)


@row("aten.cummax.default", "aten.cummin.default", means="the largest or smallest element so far, and where it is")
def cumulative_extreme(c: Call, x: Value, dim: int) -> tuple[Value, Value]:
    name, size = c.node.op.split(".")[1], _size(c, x, dim)
    dim %= max(1, len(x.shape))
    return along(c, name, x, dim, size), bounded(c, along(c, f"{name}_index", x, dim, size), 0, size)


@row("aten.cumprod.default", means="the product so far")
def cumprod(c: Call, x: Value, dim: int, *, dtype: Any = None) -> Value:
    x = c.to_dtype(x, 0, dtype)
    return along(c, "cumprod", x, dim % max(1, len(x.shape)), _size(c, x, dim), (c.result_dtype,))


@row("aten.logcumsumexp.default", means="the log of the sum of exp so far")
def logcumsumexp(c: Call, x: Value, dim: int) -> Value:
    return along(c, "logcumsumexp", x, dim % max(1, len(x.shape)), _size(c, x, dim))


@row("aten.prod.dim_int", means="the product over a dim")
def prod(c: Call, x: Value, dim: int, keep: bool = False, *, dtype: Any = None) -> Value:
    x = c.to_dtype(x, 0, dtype)
    return c.reshape(product(c, x, dim % len(x.shape)), c.node.outputs[0].shape) if x.shape else x


@row("aten.prod.default", means="the product of all elements")
def prod_all(c: Call, x: Value, *, dtype: Any = None) -> Value:
    return product(c, flat(c, c.to_dtype(x, 0, dtype)), 0)


def product(c: Call, x: Value, dim: int) -> Value:
    """Of few elements the product itself; of many it is known that equal rows have equal products."""
    size = c.size(x, dim)
    if not size or c.table.over("product_elements", size):
        return without(c, "prod", x, dim, False, (c.result_dtype,))
    rest = [*x.shape[:dim], *x.shape[dim + 1 :]]
    return functools.reduce(c.mul, [c.reshape(c.cut(x, dim, place, place + 1), rest) for place in range(size)])


@row("aten.renorm.default", means="rows of bounded norm")
def renorm(c: Call, x: Value, order: Any, dim: int, limit: Any) -> Value:
    dim %= len(x.shape)
    rest = [d for d in range(len(x.shape)) if d != dim]
    moved = c.permute(x, [dim, *rest])
    found = c.opaque(
        "renorm", [moved], 1, [c.size(moved, d) for d in range(1, len(x.shape))], (fraction(order), fraction(limit))
    )
    if len(found.shape) != len(x.shape):
        raise Undescribed("rows of another shape")
    back = [0] * len(x.shape)
    for place, d in enumerate([dim, *rest]):
        back[d] = place
    return c.permute(found, back)


@row("aten.linalg_solve_triangular.default", means="x with a x = b, or x a = b, of a triangle")
def solve_triangular(c: Call, a: Value, b: Value, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Value:
    """Each column of b, or each row, by itself; the systems of a batch are parallel, too."""
    batch = list(c.node.outputs[0].shape[:-2])
    size = c.size(a, len(a.shape) - 1)
    b = c.expand(b, [*batch, *b.shape[-2:]])
    rows = c.transpose(b, len(batch), len(batch) + 1) if left else b
    count = c.size(rows, len(batch))
    a = c.expand(c.reshape(a, [*a.shape[:-2], 1, size, size]), [*batch, count, size, size])
    found = c.opaque("solve_triangular", [a, rows], len(batch) + 1, (size,), (upper, left, unitriangular))
    if not unitriangular:
        c.need_defined(found)
    return c.transpose(found, len(batch), len(batch) + 1) if left else found
