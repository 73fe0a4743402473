"""Comparisons, logic, and choices by masks. A mask is 1 or 0."""

from __future__ import annotations

from typing import Any

from graphguard.engine.terms.lane import varies
from graphguard.engine.terms.term import Undescribed, Value
from graphguard.lemmas.registry import Call, row
from graphguard.lemmas.spans import are_whole


def _comparison(name: str) -> None:
    @row(f"aten.{name}.Tensor", f"aten.{name}.Scalar", means=f"1 where a {name} b, else 0", needs="exact for whole numbers")
    def compare(c: Call, a: Value, b: Any) -> Value:
        whole = c.is_whole(0) and (varies(b) or c.is_whole(1))
        if not whole and c.is_whole(0) and isinstance(b, float) and b.is_integer():
            whole, b = True, int(b)
        a, b = c.value(a), c.value(b)
        return c.compare(name, a, b, whole=whole or (are_whole(c.table, a) and are_whole(c.table, b)))


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _comparison(_name)


def truth(c: Call, x: Any, position: int) -> Value:
    """1 where an argument is not 0."""
    return c.cast(c.value(x), c.dtype(position), "bool")


def _bits(c: Call, a: Any, b: Any) -> tuple[Value, Value]:
    if c.dtype(0) != "bool" or c.dtype(1) != "bool":
        raise Undescribed("bits of whole numbers")
    return c.value(a), c.value(b)


def _both(c: Call, a: Value, b: Value) -> Value:
    return c.mul(*c.broadcast(a, b))


def _either(c: Call, a: Value, b: Value) -> Value:
    return c.sub(c.add(a, b), _both(c, a, b))


def _differ(c: Call, a: Value, b: Value) -> Value:
    return c.sub(c.add(a, b), c.scale(_both(c, a, b), 2))


@row("aten.logical_not.default", means="1 where x is 0, else 0")
def logical_not(c: Call, x: Value) -> Value:
    return c.negate(truth(c, x, 0))


@row("aten.bitwise_not.default", means="1 - m; -1 - x for whole numbers")
def bitwise_not(c: Call, x: Value) -> Value:
    if c.dtype(0).startswith("uint"):
        raise Undescribed("bits of whole numbers")
    return c.negate(x) if c.dtype(0) == "bool" else c.sub(c.full((), -1), x)


@row("aten.logical_and.default", means="a b, of what is not 0")
def logical_and(c: Call, a: Value, b: Value) -> Value:
    return _both(c, truth(c, a, 0), truth(c, b, 1))


@row("aten.logical_or.default", means="a + b - a b, of what is not 0")
def logical_or(c: Call, a: Value, b: Value) -> Value:
    return _either(c, truth(c, a, 0), truth(c, b, 1))


@row("aten.logical_xor.default", means="a + b - 2 a b, of what is not 0")
def logical_xor(c: Call, a: Value, b: Value) -> Value:
    return _differ(c, truth(c, a, 0), truth(c, b, 1))


@row("aten.bitwise_and.Tensor", "aten.bitwise_and.Scalar", means="a b", needs="booleans")
def bitwise_and(c: Call, a: Value, b: Any) -> Value:
    return _both(c, *_bits(c, a, b))


@row("aten.bitwise_or.Tensor", "aten.bitwise_or.Scalar", means="a + b - a b", needs="booleans")
def bitwise_or(c: Call, a: Value, b: Any) -> Value:
    return _either(c, *_bits(c, a, b))


@row("aten.bitwise_xor.Tensor", "aten.bitwise_xor.Scalar", means="a + b - 2 a b", needs="booleans")
def bitwise_xor(c: Call, a: Value, b: Any) -> Value:
    return _differ(c, *_bits(c, a, b))


@row("aten.where.self", means="m a + (1 - m) b")
def where(c: Call, m: Value, a: Value, b: Value) -> Value:
    return c.expand(c.choose(m, a, b), c.shape)


@row("aten.masked_fill.Scalar", means="m v + (1 - m) x; x + log(1 - m) for v = -inf")
def masked_fill(c: Call, x: Value, m: Value, v: Any) -> Value:
    return c.choose(m, c.stored(v, c.result_dtype), x)


@row("aten.masked_fill.Tensor", means="m v + (1 - m) x")
def masked_fill_tensor(c: Call, x: Value, m: Value, v: Value) -> Value:
    return c.choose(m, c.cast(v, c.dtype(2), c.result_dtype), x)


@row("aten.heaviside.default", means="0 below 0, y at 0, 1 above")
def heaviside(c: Call, x: Value, y: Value) -> Value:
    x, y = c.broadcast(x, y)
    return c.add(c.fn("positive", x), c.mul(y, c.compare("eq", x, c.zeros(()), whole=False)))


@row("aten.isin.Tensor_Tensor", "aten.isin.Tensor_Scalar", means="1 where x is one of the numbers", needs="one number")
def isin(c: Call, x: Value, y: Any, *, assume_unique: bool = False, invert: bool = False) -> Value:
    y = c.value(y)
    if any(c.size(y, dim) != 1 for dim in range(len(y.shape))):
        raise Undescribed("a search among several numbers")
    whole = c.is_whole(0) and c.is_whole(1)
    return c.compare("ne" if invert else "eq", x, c.reshape(y, ()), whole=whole)
