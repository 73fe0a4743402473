"""Elementwise arithmetic, and functions of which nothing more is known."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from graphguard.engine.algebra.function import is_constant, is_positive
from graphguard.engine.tensors.ops import fraction
from graphguard.engine.terms.lane import everywhere
from graphguard.engine.terms.term import Undescribed, Value
from graphguard.lemmas.registry import Call, is_whole, row
from graphguard.lemmas.rows.imaginary import complex_add, complex_div, complex_mul
from graphguard.lemmas.rows.positions import bounded
from graphguard.lemmas.spans import are_whole, span_of


@row("aten.clone.default", means="x", complex=True)
def same(c: Call, x: Value, **_: Any) -> Value:
    return x


@row("aten._to_copy.default", means="x; whole numbers for floats that become integers, 0 or 1 for booleans", complex=True)
def cast(c: Call, x: Value, **_: Any) -> Value:
    if c.result_dtype == "int64" and c.dtype(0).startswith(("float", "bfloat")) and are_whole(c.table, x):
        return x
    return c.cast(x, c.dtype(0), c.result_dtype)


@row("aten.copy.default", means="y in the shape and dtype of x", complex=True)
def copy(c: Call, x: Value, y: Value, *_: Any) -> Value:
    return c.expand(c.cast(y, c.dtype(1), c.dtype(0)), x.shape)


@row("aten.fill.Scalar", means="a number everywhere")
def fill(c: Call, x: Value, number: Any) -> Value:
    return c.full(x.shape, c.stored(number, c.result_dtype))


@row("aten.fill.Tensor", means="a number everywhere")
def fill_tensor(c: Call, x: Value, number: Value) -> Value:
    return c.expand(c.cast(number, c.dtype(1), c.dtype(0)), x.shape)


@row("aten.zero.default", means="0", complex=True)
def zero(c: Call, x: Value) -> Value:
    return c.zeros(x.shape)


def _either(c: Call, a: Value, b: Value) -> Value:
    return c.sub(c.add(a, b), c.mul(*c.broadcast(a, b)))


def _both_bool(c: Call) -> bool:
    return c.dtype(0) == c.dtype(1) == "bool"


@row("aten.add.Tensor", "aten.add.Scalar", means="a + alpha b; a or b, for booleans", complex=True)
def add(c: Call, a: Any, b: Any, alpha: Any = 1) -> Value:
    if c.result_dtype.startswith("complex"):
        return complex_add(c, a, b, alpha)
    a, b = c.value(a), c.value(b)
    if _both_bool(c):
        if alpha not in (0, 1):
            raise Undescribed("a multiple of booleans")
        return _either(c, a, c.scale(b, alpha))
    return c.add(a, c.scale(b, alpha))


@row("aten.sub.Tensor", "aten.sub.Scalar", means="a - alpha b", complex=True)
def sub(c: Call, a: Any, b: Any, alpha: Any = 1) -> Value:
    return add(c, a, b, -alpha)


@row("aten.rsub.Scalar", "aten.rsub.Tensor", means="b - alpha a")
def rsub(c: Call, a: Value, b: Any, alpha: Any = 1) -> Value:
    return c.sub(c.value(b), c.scale(a, alpha))


@row("aten.mul.Tensor", "aten.mul.Scalar", means="a b", complex=True)
def mul(c: Call, a: Any, b: Any) -> Value:
    if c.result_dtype.startswith("complex"):
        return complex_mul(c, a, b)
    a, b = c.value(a), c.value(b)
    return c.mul(a, b) if len(a.shape) >= len(b.shape) else c.mul(b, a)


@row("aten.div.Tensor", "aten.div.Scalar", means="a / b", complex=True)
def div(c: Call, a: Any, b: Any) -> Value:
    if c.result_dtype.startswith("complex"):
        return complex_div(c, a, b)
    a, b = c.value(a), c.value(b)
    number = is_constant(b)
    if number:
        wide, _ = c.broadcast(a, b)
        return c.scale(wide, 1 / number)
    return c.div(a, b)


@row("aten.div.Tensor_mode", "aten.div.Scalar_mode", means="a / b, rounded down or towards 0")
def div_rounded(c: Call, a: Any, b: Any, *, rounding_mode: str | None) -> Value:
    if rounding_mode is None:
        return div(c, a, b)
    if rounding_mode == "floor":
        return c.fn("floor_divide", c.value(a), c.value(b))
    return c.fn("trunc", div(c, a, b))


@row("aten.floor_divide.default", "aten.floor_divide.Scalar", means="a / b, rounded down")
def floor_divide(c: Call, a: Any, b: Any) -> Value:
    return c.fn("floor_divide", c.value(a), c.value(b))


@row("aten.neg.default", means="-x", complex=True)
def neg(c: Call, x: Value) -> Value:
    if c.result_dtype.startswith("uint"):
        raise Undescribed("a negative number of a dtype that has none")
    return c.neg(x)


@row("aten.reciprocal.default", means="1 / x")
def reciprocal(c: Call, x: Value) -> Value:
    return c.power(x, -1)


@row("aten.pow.Tensor_Scalar", means="x to a rational power")
def pow_scalar(c: Call, x: Value, exponent: Any) -> Value:
    return c.power(x, exponent)


@row("aten.pow.Tensor_Tensor", "aten.pow.Scalar", means="x to the power y, of which nothing more is known")
def pow_tensor(c: Call, x: Any, y: Any) -> Value:
    x, y = c.value(x), c.value(y)
    number = is_constant(y)
    if number is None and is_whole(c.result_dtype):
        raise Undescribed("a whole number to a power that may be below 0")
    return c.power(c.broadcast(x, y)[0], number) if number is not None else c.fn("power", x, y)


@row("aten.sqrt.default", means="x to the power 1/2")
def sqrt(c: Call, x: Value) -> Value:
    return c.power(x, Fraction(1, 2))


@row("aten.rsqrt.default", means="x to the power -1/2")
def rsqrt(c: Call, x: Value) -> Value:
    return c.power(x, Fraction(-1, 2))


@row("aten.exp.default", means="exp(x); exp(a + b) = exp(a) exp(b)")
def exp(c: Call, x: Value) -> Value:
    return c.exp(x)


@row("aten.expm1.default", means="exp(x) - 1")
def expm1(c: Call, x: Value) -> Value:
    return c.sub(c.exp(x), c.ones(()))


@row("aten.log.default", means="log(x); a sum for a product of positive factors")
def log(c: Call, x: Value) -> Value:
    return c.log(x)


@row("aten.log1p.default", means="log(1 + x)")
def log1p(c: Call, x: Value) -> Value:
    return c.log(c.add(x, c.ones(())))


@row("aten.logaddexp.default", means="log(exp(a) + exp(b))")
def logaddexp(c: Call, a: Value, b: Value) -> Value:
    return c.log(c.add(c.exp(a), c.exp(b)))


_UNARY = (
    "abs", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "sign", "sgn",
    "floor", "ceil", "round", "trunc", "frac", "log2", "log10", "exp2", "lgamma", "isnan", "isinf", "sinc",
)  # fmt: skip


@row(*(f"aten.{name}.default" for name in _UNARY), means="a function of each element, of which nothing more is known")
def unary(c: Call, x: Value) -> Value:
    name = c.node.op.split(".")[1].removesuffix("_")
    if name in ("floor", "ceil", "round", "trunc") and are_whole(c.table, x):
        return x
    return c.fn("sign" if name == "sgn" else name, x)


_BINARY = {
    "hypot.default": "hypot", "xlogy.Tensor": "xlogy", "fmod.Tensor": "fmod", "fmod.Scalar": "fmod",
    "remainder.Tensor": "remainder", "maximum.default": "maximum",
    "minimum.default": "minimum", "fmax.default": "maximum", "fmin.default": "minimum",
}  # fmt: skip


@row(*(f"aten.{name}" for name in _BINARY), means="a function of two elements, of which nothing more is known")
def binary(c: Call, a: Any, b: Any) -> Value:
    name = c.node.op.split(".")[1].removesuffix("_")
    name = {"fmax": "maximum", "fmin": "minimum", "max": "maximum", "min": "minimum"}.get(name, name)
    left, right = c.broadcast(c.value(a), c.value(b))
    if name == "maximum" and c.is_minus_infinity(left):
        return right
    if name == "maximum" and c.is_minus_infinity(right):
        return left
    if name == "xlogy" and is_positive(right):
        return c.mul(left, c.log(right))
    return extreme(c, name, left, right) if name in ("maximum", "minimum") else c.fn(name, left, right)


def extreme(c: Call, name: str, a: Value, b: Value) -> Value:
    """The larger or the smaller of two: a clamp, if one of them is a number."""
    for x, bound in ((a, b), (b, a)):
        number = is_constant(bound)
        if number is not None and is_constant(x) is None:
            return clamped(c, c.broadcast(x, bound)[0], *((number, None) if name == "maximum" else (None, number)))
    return c.fn(name, a, b)


@row("aten.remainder.Scalar", means="what is left of x after whole multiples of a number; x where that is known to be smaller")
def remainder(c: Call, x: Value, number: Any) -> Value:
    divisor = c.value(number)
    if not c.is_whole(0) or not isinstance(number, int) or isinstance(number, bool) or number < 1:
        return c.fn("remainder", x, divisor)
    span = span_of(c.table, x)
    if span is not None and everywhere(span[0] >= 0) and everywhere(span[1] < number):
        return x
    return bounded(c, c.fn("remainder", x, divisor), 0, number)


@row("aten.clamp.default", means="x between two numbers")
def clamp(c: Call, x: Value, low: Any = None, high: Any = None) -> Value:
    return clamped(c, x, low, high)


@row("aten.clamp_min.default", means="x, at least a number")
def clamp_min(c: Call, x: Value, low: Any) -> Value:
    return clamped(c, x, low, None)


@row("aten.clamp_max.default", means="x, at most a number")
def clamp_max(c: Call, x: Value, high: Any) -> Value:
    return clamped(c, x, None, high)


def clamped(c: Call, x: Value, low: Any, high: Any) -> Value:
    for number in (low, high):
        if number is not None:
            c.require_fits(number)
    bounds = _bound(low, float("-inf")), _bound(high, float("inf"))
    if c.is_whole(0) and span_of(c.table, x) is not None and all(isinstance(each, int | None) for each in (low, high)):
        return _clamped_to_numbers(c, x, low, high)
    if bounds == (Fraction(0), None):
        return c.fn("relu", x)
    given = [bound for bound in bounds if bound is not None]
    if _is_reciprocal(x) and given == sorted(given) and all(bound > 0 for bound in given):
        least, most = (None if bound is None else 1 / bound for bound in reversed(bounds))
        return c.power(c.fn("clamp", c.power(x, -1), parameters=(least, most)), -1)
    return c.fn("clamp", x, parameters=bounds)


def _is_reciprocal(x: Value) -> bool:
    """Whether it is one over something above zero: min(1, c / n) is 1 / max(1, n / c), and is written so."""
    return len(x.terms) == 1 and is_positive(x) and all(f.power < 0 for f in x.terms[0].factors) and bool(x.terms[0].factors)


def _clamped_to_numbers(c: Call, x: Value, low: int | None, high: int | None) -> Value:
    """An index that is clamped into a range is itself there, and the ends elsewhere; the high end if the range is empty."""
    if low is not None and high is not None and low > high:
        return c.full(x.shape, high)
    ends = [(name, c.full(x.shape, end)) for name, end in (("lt", low), ("gt", high)) if end is not None]
    beyond = [c.compare(name, x, end, whole=True) for name, end in ends]
    inside = c.negate(c.add(*beyond))
    return c.add(c.mul(x, inside), *(c.mul(end, mask) for (_, end), mask in zip(ends, beyond, strict=True)))


def _bound(number: Any, none: float) -> Fraction | None:
    return None if number is None or number == none else fraction(number)


@row("aten.clamp.Tensor", means="x between two tensors")
def clamp_tensor(c: Call, x: Value, low: Value | None = None, high: Value | None = None) -> Value:
    x = x if low is None else extreme(c, "maximum", x, low)
    return x if high is None else extreme(c, "minimum", x, high)


@row("aten.clamp_min.Tensor", means="the larger of two")
def clamp_min_tensor(c: Call, x: Value, low: Value) -> Value:
    return extreme(c, "maximum", x, low)


@row("aten.clamp_max.Tensor", means="the smaller of two")
def clamp_max_tensor(c: Call, x: Value, high: Value) -> Value:
    return extreme(c, "minimum", x, high)


@row("aten.addcmul.default", means="x + value a b")
def addcmul(c: Call, x: Value, a: Value, b: Value, value: Any = 1) -> Value:
    return c.add(x, _times(c, c.mul(*c.broadcast(a, b)), value))


@row("aten.addcdiv.default", means="x + value a / b")
def addcdiv(c: Call, x: Value, a: Value, b: Value, value: Any = 1) -> Value:
    return c.add(x, _times(c, c.div(*c.broadcast(a, b)), value))


def _times(c: Call, x: Value, number: Any) -> Value:
    return c.mul(x, number) if isinstance(number, Value) else c.scale(x, number)


@row("aten.lerp.Scalar", "aten.lerp.Tensor", means="x + w (y - x)")
def lerp(c: Call, x: Value, y: Value, w: Any) -> Value:
    return c.add(x, _times(c, c.sub(y, x), w))
