"""Complex numbers: one more dim of two, the real and the imaginary part."""

from __future__ import annotations

from typing import Any

from graphguard.engine.terms.term import Undescribed, Value
from graphguard.lemmas.registry import Call, row


def parts(c: Call, operand: Any, position: int) -> tuple[Value, Value]:
    """The real and the imaginary part of an argument, each with a last dim of one."""
    value = c.value(operand)
    if isinstance(operand, Value) and c.is_complex(position):
        last = len(value.shape) - 1
        return c.cut(value, last, 0, 1), c.cut(value, last, 1, 2)
    real = c.reshape(value, (*value.shape, 1))
    return real, c.zeros(real.shape)


def joined(c: Call, real: Value, imaginary: Value) -> Value:
    real, imaginary = c.broadcast(real, imaginary)
    return c.concat([real, imaginary], len(real.shape) - 1)


def complex_add(c: Call, a: Any, b: Any, alpha: Any) -> Value:
    if isinstance(alpha, complex):
        raise Undescribed("a complex number")
    (ar, ai), (br, bi) = parts(c, a, 0), parts(c, b, 1)
    return joined(c, c.add(ar, c.scale(br, alpha)), c.add(ai, c.scale(bi, alpha)))


def complex_mul(c: Call, a: Any, b: Any) -> Value:
    (ar, ai), (br, bi) = parts(c, a, 0), parts(c, b, 1)
    return joined(c, c.sub(_mul(c, ar, br), _mul(c, ai, bi)), c.add(_mul(c, ar, bi), _mul(c, ai, br)))


def _mul(c: Call, a: Value, b: Value) -> Value:
    return c.mul(*c.broadcast(a, b))


def complex_div(c: Call, a: Any, b: Any) -> Value:
    (ar, ai), (br, bi) = parts(c, a, 0), parts(c, b, 1)
    if not bi.terms:
        return joined(c, c.div(*c.broadcast(ar, br)), c.div(*c.broadcast(ai, br)))
    raise Undescribed("a division by a complex number")


@row("aten._conj.default", "aten._conj_physical.default", means="(re, -im)", complex=True)
def conj(c: Call, x: Value) -> Value:
    if not c.is_complex():
        return x
    real, imaginary = parts(c, x, 0)
    return joined(c, real, c.neg(imaginary))


@row("aten._neg_view.default", means="-x", complex=True)
def neg_view(c: Call, x: Value) -> Value:
    return c.neg(x)


@row(
    "aten.view_as_complex.default",
    "aten.view_as_real.default",
    means="pairs of reals as complex numbers, and back",
    complex=True,
)
def pairs(c: Call, x: Value) -> Value:
    return x


@row("aten.polar.default", means="(a cos(b), a sin(b))", complex=True)
def polar(c: Call, a: Value, b: Value) -> Value:
    a, b = c.broadcast(a, b)
    real, imaginary = (c.mul(a, c.fn(name, b)) for name in ("cos", "sin"))
    return joined(c, c.reshape(real, (*real.shape, 1)), c.reshape(imaginary, (*imaginary.shape, 1)))


@row("aten.complex.default", means="(a, b)", complex=True)
def complex_(c: Call, a: Value, b: Value) -> Value:
    a, b = c.broadcast(a, b)
    return joined(c, c.reshape(a, (*a.shape, 1)), c.reshape(b, (*b.shape, 1)))
