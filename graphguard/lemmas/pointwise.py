"""Elementwise arithmetic and functions."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from graphguard.engine.function import is_constant
from graphguard.engine.lane import varies
from graphguard.engine.ops import fraction
from graphguard.engine.term import Undescribed, Value
from graphguard.lemmas.registry import Call, row

_SAME = (
    "clone", "alias", "detach", "contiguous", "lift_fresh_copy", "lift_fresh", "positive", "resolve_conj", "resolve_neg",
)  # fmt: skip


@row(*(f"aten.{name}.default" for name in _SAME), means="x")
def same(c: Call, x: Value, **_: Any) -> Value:
    return x


@row("aten._to_copy.default", "aten.to.dtype", "aten.type_as.default", means="x", needs="real arithmetic; no float becomes an integer")
def cast(c: Call, x: Value, *_: Any, **__: Any) -> Value:
    before, after = c.dtype(0), c.node.outputs[0].dtype
    if after == "bool" and before != "bool":
        return c.compare("ne", x, c.zeros(()), whole=before.startswith(("int", "uint")))
    if after.startswith(("int", "uint")) and not before.startswith(("int", "uint", "bool")):
        return c.fn("trunc", x)
    return x


@row("aten._conj.default", "aten._conj_physical.default", means="(re, -im)")
def conj(c: Call, x: Value) -> Value:
    if not c.dtype(0).startswith("complex"):
        return x
    last = len(x.shape) - 1
    return c.concat([c.cut(x, last, 0, 1), c.neg(c.cut(x, last, 1, 2))], last)


@row("aten.add.Tensor", "aten.add.Scalar", means="a + alpha b")
def add(c: Call, a: Value, b: Any, alpha: Any = 1, **kwargs: Any) -> Value:
    if c.node.outputs[0].dtype == "bool":
        raise Undescribed("a sum of booleans")
    return c.add(c.value(a), c.scale(c.value(b), kwargs.get("alpha", alpha)))


@row("aten.sub.Tensor", "aten.sub.Scalar", means="a - alpha b")
def sub(c: Call, a: Value, b: Any, alpha: Any = 1, **kwargs: Any) -> Value:
    return c.sub(c.value(a), c.scale(c.value(b), kwargs.get("alpha", alpha)))


@row("aten.rsub.Scalar", "aten.rsub.Tensor", means="b - alpha a")
def rsub(c: Call, a: Value, b: Any, alpha: Any = 1) -> Value:
    return c.sub(c.value(b), c.scale(a, alpha))


@row("aten.mul.Tensor", "aten.mul.Scalar", means="a b")
def mul(c: Call, a: Value, b: Any) -> Value:
    a, b = c.value(a), c.value(b)
    if c.node.outputs[0].dtype.startswith("complex"):
        return _complex_mul(c, a, b)
    return c.mul(a, b) if len(a.shape) >= len(b.shape) else c.mul(b, a)


def _complex_mul(c: Call, a: Value, b: Value) -> Value:
    """A complex tensor has one more dim of two: the real and the imaginary part."""
    parts = []
    for position, value in enumerate((a, b)):
        if c.dtype(position).startswith("complex"):
            last = len(value.shape) - 1
            parts.append((c.cut(value, last, 0, 1), c.cut(value, last, 1, 2)))
        else:
            real = c.reshape(value, (*value.shape, 1))
            parts.append((real, c.zeros(real.shape)))
    (ar, ai), (br, bi) = parts
    real, imaginary = c.sub(c.mul(ar, br), c.mul(ai, bi)), c.add(c.mul(ar, bi), c.mul(ai, br))
    return c.concat([real, imaginary], len(real.shape) - 1)


@row("aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor", means="a / b")
def div(c: Call, a: Value, b: Any) -> Value:
    a, b = c.value(a), c.value(b)
    number = is_constant(b)
    if number:
        wide, _ = c.broadcast(a, b)
        return c.scale(wide, 1 / number)
    return c.div(a, b)


@row("aten.div.Tensor_mode", "aten.div.Scalar_mode", means="a / b, rounded")
def div_rounded(c: Call, a: Value, b: Any, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return div(c, a, b)
    if rounding_mode == "floor":
        return c.fn("floor_divide", c.value(a), c.value(b))
    return c.fn("trunc", c.div(c.value(a), c.value(b)))


@row("aten.floor_divide.default", "aten.floor_divide.Scalar", means="floor(a / b)")
def floor_divide(c: Call, a: Value, b: Any) -> Value:
    return c.fn("floor_divide", c.value(a), c.value(b))


@row("aten.remainder.Scalar", "aten.remainder.Tensor", means="a mod b")
def remainder(c: Call, a: Value, b: Any) -> Value:
    return c.fn("remainder", c.value(a), c.value(b))


@row("aten.neg.default", means="-x")
def neg(c: Call, x: Value) -> Value:
    return c.neg(x)


@row("aten.reciprocal.default", means="1 / x")
def reciprocal(c: Call, x: Value) -> Value:
    return c.power(x, -1)


@row("aten.pow.Tensor_Scalar", means="x to a rational power")
def pow_scalar(c: Call, x: Value, exponent: Any) -> Value:
    return c.power(x, exponent)


@row("aten.pow.Tensor_Tensor", "aten.pow.Scalar", means="x to the power y, of which nothing more is known")
def pow_tensor(c: Call, x: Any, y: Any) -> Value:
    y = c.value(y)
    number = is_constant(y)
    return c.power(c.broadcast(c.value(x), y)[0], number) if number is not None else c.fn("power", c.value(x), y)


@row("aten.sqrt.default", means="x to the power 1/2")
def sqrt(c: Call, x: Value) -> Value:
    return c.power(x, Fraction(1, 2))


@row("aten.rsqrt.default", means="x to the power -1/2")
def rsqrt(c: Call, x: Value) -> Value:
    return c.power(x, Fraction(-1, 2))


@row("aten.square.default", means="x²")
def square(c: Call, x: Value) -> Value:
    return c.power(x, 2)


@row("aten.exp.default", means="exp(x); exp(a + b) = exp(a) exp(b)")
def exp(c: Call, x: Value) -> Value:
    return c.exp(x)


@row("aten.log.default", means="log(x); a sum for a product of positive factors")
def log(c: Call, x: Value) -> Value:
    return c.log(x)


@row("aten.sigmoid.default", means="sigmoid(x)")
def sigmoid(c: Call, x: Value) -> Value:
    return c.fn("sigmoid", x)


@row("aten.sigmoid_backward.default", means="g y (1 - y)")
def sigmoid_backward(c: Call, g: Value, y: Value) -> Value:
    return c.mul(g, c.mul(y, c.sub(c.ones(y.shape), y)))


@row("aten.tanh.default", means="tanh(x)")
def tanh(c: Call, x: Value) -> Value:
    return c.fn("tanh", x)


@row("aten.tanh_backward.default", means="g (1 - y²)")
def tanh_backward(c: Call, g: Value, y: Value) -> Value:
    return c.sub(g, c.mul(g, c.mul(y, y)))


@row("aten.relu.default", means="max(x, 0)")
def relu(c: Call, x: Value) -> Value:
    return c.fn("relu", x)


@row("aten.threshold_backward.default", means="g where x > threshold")
def threshold_backward(c: Call, g: Value, x: Value, threshold: Any) -> Value:
    if fraction(threshold):
        raise Undescribed("a threshold that is not zero")
    # Where y is relu(x), y > 0 exactly where x > 0.
    return c.mul(g, c.fn("positive", x))


@row("aten.silu.default", means="x sigmoid(x)")
def silu(c: Call, x: Value) -> Value:
    return c.mul(x, c.fn("sigmoid", x))


@row("aten.silu_backward.default", means="g s (1 + x (1 - s)), s = sigmoid(x)")
def silu_backward(c: Call, g: Value, x: Value) -> Value:
    return c.mul(g, c.fn("silu_slope", x))


@row("aten.gelu.default", means="gelu(x), exact or by tanh")
def gelu(c: Call, x: Value, *, approximate: str = "none") -> Value:
    return c.fn("gelu", x, parameters=(approximate,))


@row("aten.gelu_backward.default", means="g times the slope of gelu at x")
def gelu_backward(c: Call, g: Value, x: Value, *, approximate: str = "none") -> Value:
    return c.mul(g, c.fn("gelu_slope", x, parameters=(approximate,)))


@row("aten.clamp.default", "aten.clamp_min.default", "aten.clamp_max.default", "aten.hardtanh.default", means="x between two numbers")
def clamp(c: Call, x: Value, first: Any = None, second: Any = None, **kwargs: Any) -> Value:
    low, high = kwargs.get("min", first), kwargs.get("max", second)
    if "clamp_max" in c.node.op:
        low, high = None, first
    return c.fn("clamp", x, parameters=(_bound(low), _bound(high)))


def _bound(number: Any) -> Fraction | None:
    return None if number is None or number in (float("inf"), float("-inf")) else fraction(number)


@row("aten.maximum.default", means="the larger of two")
def maximum(c: Call, a: Value, b: Value) -> Value:
    return c.fn("maximum", a, b)


@row("aten.minimum.default", means="the smaller of two")
def minimum(c: Call, a: Value, b: Value) -> Value:
    return c.fn("minimum", a, b)


_UNKNOWN = ("abs", "sin", "cos", "tan", "erf", "sign", "floor", "ceil", "round", "trunc", "log1p", "log2", "log10", "expm1",
            "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "softplus", "isnan", "isinf", "sgn")  # fmt: skip


@row(*(f"aten.{name}.default" for name in _UNKNOWN), means="a function of each element, of which nothing more is known")
def unknown(c: Call, x: Value, *parameters: Any) -> Value:
    name = c.node.op.split(".")[1].removesuffix("_")
    return c.fn(name, x, parameters=tuple(fraction(p) if isinstance(p, (int, float)) else p for p in parameters))


def _comparison(name: str) -> None:
    @row(f"aten.{name}.Tensor", f"aten.{name}.Scalar", means=f"1 where a {name} b, else 0", needs="exact for whole numbers")
    def compare(c: Call, a: Value, b: Any) -> Value:
        whole = c.is_whole(0) and (c.is_whole(1) or varies(b))
        if not whole and c.is_whole(0) and isinstance(b, float) and b.is_integer():
            whole, b = True, int(b)
        return c.compare(name, c.value(a), c.value(b), whole=whole)


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _comparison(_name)


@row("aten.logical_not.default", "aten.bitwise_not.default", means="1 - m", needs="booleans")
def logical_not(c: Call, m: Value) -> Value:
    _require_bool(c)
    return c.negate(m)


@row("aten.logical_and.default", "aten.bitwise_and.Tensor", "aten.__and__.Tensor", means="a b", needs="booleans")
def logical_and(c: Call, a: Value, b: Value) -> Value:
    _require_bool(c)
    return c.mul(a, b)


@row("aten.logical_or.default", "aten.bitwise_or.Tensor", "aten.__or__.Tensor", means="a + b - a b", needs="booleans")
def logical_or(c: Call, a: Value, b: Value) -> Value:
    _require_bool(c)
    return c.sub(c.add(a, b), c.mul(a, b))


def _require_bool(c: Call) -> None:
    if any(c.dtype(position) != "bool" for position, arg in enumerate(c.node.args) if arg is not None):
        raise Undescribed("bits of whole numbers")


@row("aten.where.self", means="m a + (1 - m) b")
def where(c: Call, m: Value, a: Any, b: Any) -> Value:
    return c.choose(m, a, b)


@row("aten.masked_fill.Scalar", "aten.masked_fill.Tensor", means="m v + (1 - m) x; x + log(1 - m) for v = -inf")
def masked_fill(c: Call, x: Value, m: Value, v: Any) -> Value:
    return c.choose(m, v, x)


@row("aten.addcmul.default", means="x + value a b")
def addcmul(c: Call, x: Value, a: Value, b: Value, value: Any = 1) -> Value:
    return c.add(x, c.scale(c.mul(a, b), value))


@row("aten.addcdiv.default", means="x + value a / b")
def addcdiv(c: Call, x: Value, a: Value, b: Value, value: Any = 1) -> Value:
    return c.add(x, c.scale(c.div(a, b), value))


@row("aten.lerp.Scalar", means="x + w (y - x)")
def lerp(c: Call, x: Value, y: Value, w: Any) -> Value:
    return c.add(x, c.scale(c.sub(y, x), w))


@row("aten.lerp.Tensor", means="x + w (y - x)")
def lerp_tensor(c: Call, x: Value, y: Value, w: Value) -> Value:
    return c.add(x, c.mul(w, c.sub(y, x)))


@row("aten.copy.default", means="y in the shape of x")
def copy(c: Call, x: Value, y: Value, *_: Any) -> Value:
    return c.expand(y, x.shape)


@row("aten.fill.Scalar", means="a number everywhere")
def fill(c: Call, x: Value, number: Any) -> Value:
    return c.full(x.shape, number)


@row("aten.fill.Tensor", means="a number everywhere")
def fill_tensor(c: Call, x: Value, number: Value) -> Value:
    return c.expand(number, x.shape)


@row("aten.zero.default", means="0")
def zero(c: Call, x: Value) -> Value:
    return c.zeros(x.shape)
