"""Tensors from nothing: constants, positions, triangles."""

from __future__ import annotations

from typing import Any

from graphguard.engine.tensors.ops import fraction
from graphguard.engine.terms.term import Undescribed, Value
from graphguard.lemmas.registry import Call, is_whole, row


@row("aten.zeros.default", "aten.zeros_like.default", "aten.new_zeros.default", "aten._efficientzerotensor.default", means="0",
     complex=True)  # fmt: skip
def zeros(c: Call, *_: Any, **__: Any) -> Value:
    return c.zeros(c.shape)


@row("aten.ones.default", "aten.ones_like.default", "aten.new_ones.default", means="1")
def ones(c: Call, *_: Any, **__: Any) -> Value:
    return c.ones(c.shape)


@row("aten.full.default", "aten.full_like.default", means="one number")
def full(c: Call, _: Any, number: Any, **__: Any) -> Value:
    return c.full(c.shape, c.stored(number, c.result_dtype))


@row("aten.new_full.default", means="one number")
def new_full(c: Call, _: Any, __: Any, number: Any, **___: Any) -> Value:
    return c.full(c.shape, c.stored(number, c.result_dtype))


@row("aten.scalar_tensor.default", means="one number")
def scalar_tensor(c: Call, number: Any, **_: Any) -> Value:
    return c.full((), c.stored(number, c.result_dtype))


@row("aten.arange.default", means="0, 1, 2, ...")
def arange(c: Call, _: Any, **__: Any) -> Value:
    return c.arange(c.shape[0])


@row("aten.arange.start", "aten.arange.start_step", means="start, start + step, ...", needs="no rounding to whole numbers")
def arange_start(c: Call, start: Any, _: Any, step: Any = 1, **__: Any) -> Value:
    if is_whole(c.result_dtype) and any(isinstance(n, float) and not n.is_integer() for n in (start, step)):
        raise Undescribed("a range that is rounded to whole numbers")
    if step == 1 and not isinstance(start, float):
        return c.arange(c.shape[0], start)
    return c.add(c.scale(c.arange(c.shape[0]), step), c.full((), start))


@row("aten.eye.default", "aten.eye.m", means="1 on the diagonal")
def eye(c: Call, *_: Any, **__: Any) -> Value:
    rows, columns = c.shape
    return c.compare("eq", c.reshape(c.arange(rows), [rows, 1]), c.arange(columns), whole=True)


@row("aten.tril.default", means="x where j <= i + k")
def tril(c: Call, x: Value, k: int = 0) -> Value:
    return _triangle(c, x, lower=True, k=k)


@row("aten.triu.default", means="x where j >= i + k")
def triu(c: Call, x: Value, k: int = 0) -> Value:
    return _triangle(c, x, lower=False, k=k)


def _triangle(c: Call, x: Value, lower: bool, k: int) -> Value:
    rows, columns = c.size(x, len(x.shape) - 2), c.size(x, len(x.shape) - 1)
    i, j = c.reshape(c.arange(rows), [rows, 1]), c.arange(columns, -k)
    mask = c.compare("le" if lower else "ge", j, i, whole=True)
    return c.choose(mask, x, 0)


@row("aten.linspace.default", means="numbers at equal distances", needs="no rounding to whole numbers")
def linspace(c: Call, start: Any, stop: Any, steps: int, **_: Any) -> Value:
    if is_whole(c.result_dtype):
        raise Undescribed("a range that is rounded to whole numbers")
    if steps < 2:
        return c.full(c.shape, start)
    step = (fraction(stop) - fraction(start)) / (steps - 1)
    return c.add(c.scale(c.arange(steps), step), c.full((), start))
