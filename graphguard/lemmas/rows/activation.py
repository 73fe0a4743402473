"""Activation functions and their gradients."""

from __future__ import annotations

import math
from collections.abc import Hashable
from fractions import Fraction
from typing import Any

from graphguard.engine.tensors.ops import fraction
from graphguard.engine.terms.term import Undescribed, Value
from graphguard.lemmas.registry import Call, row
from graphguard.lemmas.rows.arithmetic import clamped

HALF = Fraction(1, 2)
ROOT_OF_TWO = math.sqrt(2)
GELU_SCALE, GELU_CUBE = math.sqrt(2 / math.pi), 0.044715


@row("aten.sigmoid.default", means="sigmoid(x)")
def sigmoid(c: Call, x: Value) -> Value:
    return c.sigmoid(x)


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


@row("aten.threshold.default", means="x where x > threshold, else a number")
def threshold(c: Call, x: Value, limit: Any, number: Any) -> Value:
    limit, number = (c.stored(each, c.result_dtype) for each in (limit, number))
    return c.choose(c.compare("gt", x, c.full((), limit), whole=False), x, number)


@row("aten.threshold_backward.default", means="g where x > threshold")
def threshold_backward(c: Call, g: Value, x: Value, limit: Any) -> Value:
    if fraction(limit):
        return c.mul(g, c.compare("gt", x, c.full((), limit), whole=False))
    return c.mul(g, c.fn("positive", x))


@row("aten.silu.default", means="x sigmoid(x)")
def silu(c: Call, x: Value) -> Value:
    return c.mul(x, c.sigmoid(x))


@row("aten.erf.default", means="2 Φ(√2 x) - 1, with Φ the share of a normal distribution below x")
def erf(c: Call, x: Value) -> Value:
    if x.terms and all(term.coefficient < 0 for term in x.terms):
        return c.neg(erf(c, c.neg(x)))
    return c.sub(c.scale(_share_below(c, c.scale(x, ROOT_OF_TWO)), 2), c.ones(x.shape))


@row("aten.erfc.default", means="1 - erf(x)")
def erfc(c: Call, x: Value) -> Value:
    return c.sub(c.ones(x.shape), erf(c, x))


def _share_below(c: Call, x: Value) -> Value:
    """The share of a normal distribution below x: (1 + erf(x / √2)) / 2."""
    return c.fn("normal_share", x)


def _tanh_of_gelu(c: Call, x: Value) -> Value:
    return c.fn("tanh", c.scale(c.add(x, c.scale(c.power(x, 3), GELU_CUBE)), GELU_SCALE))


@row("aten.gelu.default", means="x Φ(x), or x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2")
def gelu(c: Call, x: Value, *, approximate: str = "none") -> Value:
    x = c.atomic(x)
    if approximate == "none":
        return c.mul(x, _share_below(c, x))
    return c.mul(c.scale(x, HALF), c.add(_tanh_of_gelu(c, x), c.ones(x.shape)))


@row("aten.gelu_backward.default", means="g times the slope of gelu at x")
def gelu_backward(c: Call, g: Value, x: Value, *, approximate: str = "none") -> Value:
    x = c.atomic(x)
    if approximate == "none":
        density = c.scale(c.exp(c.scale(c.power(x, 2), -HALF)), 1 / math.sqrt(2 * math.pi))
        return c.mul(g, c.add(_share_below(c, x), c.mul(x, density)))
    tanh = _tanh_of_gelu(c, x)
    steepness = c.scale(c.add(c.ones(x.shape), c.scale(c.power(x, 2), 3 * fraction(GELU_CUBE))), GELU_SCALE)
    bend = c.mul(c.mul(x, c.sub(c.ones(x.shape), c.power(tanh, 2))), steepness)
    return c.mul(g, c.scale(c.add(c.ones(x.shape), tanh, bend), HALF))


@row("aten.hardtanh.default", means="x between two numbers")
def hardtanh(c: Call, x: Value, low: Any = -1, high: Any = 1) -> Value:
    return clamped(c, x, low, high)


# Functions of x with numbers as parameters, and their defaults.
_CURVES: dict[str, tuple[Any, ...]] = {
    "leaky_relu": (0.01,), "elu": (1, 1, 1), "celu": (1,), "softplus": (1, 20), "mish": (), "hardswish": (), "hardsigmoid": (),
    "hardshrink": (0.5,), "softshrink": (0.5,),
}  # fmt: skip
_SLOPES = {
    "hardswish_backward": "hardswish_slope",
    "hardsigmoid_backward": "hardsigmoid_slope", "hardtanh_backward": "hardtanh_slope", "softplus_backward": "softplus_slope",
    "leaky_relu_backward": "leaky_relu_slope", "hardshrink_backward": "shrink_slope", "softshrink_backward": "shrink_slope",
}  # fmt: skip


def _numbers(parameters: tuple[Any, ...]) -> tuple[Hashable, ...]:
    return tuple(fraction(p) for p in parameters)


@row(*(f"aten.{name}.default" for name in _CURVES), means="a curve with given parameters, of which nothing more is known")
def curve(c: Call, x: Value, *parameters: Any) -> Value:
    name = c.node.op.split(".")[1].removesuffix("_")
    numbers = _numbers((*parameters, *_CURVES[name][len(parameters) :]))
    if name == "softplus" and numbers[0] <= 0:  # type: ignore[operator]
        raise Undescribed("a softplus that is upside down")
    return c.fn(name, x, parameters=numbers)


@row(*(f"aten.{name}.default" for name in _SLOPES), means="g times the slope of a curve at x")
def slope(c: Call, g: Value, x: Value, *parameters: Any) -> Value:
    name = _SLOPES[c.node.op.split(".")[1]]
    if name == "leaky_relu_slope":
        parameters = parameters[:1]  # the result has the sign of x
        if fraction(parameters[0]) < 0:
            raise Undescribed("a leaky_relu with a negative slope")
    return c.mul(g, c.fn(name, x, parameters=_numbers(parameters)))


@row("aten.elu_backward.default", means="g times the slope of elu")
def elu_backward(c: Call, g: Value, alpha: Any, scale: Any, input_scale: Any, of_result: bool, x: Value) -> Value:
    name = "elu_slope_of_result" if of_result else "elu_slope"
    return c.mul(g, c.fn(name, x, parameters=_numbers((alpha, scale, input_scale))))


@row("aten.log_sigmoid_forward.default", means="log(sigmoid(x)), and exp(-|x|)")
def log_sigmoid(c: Call, x: Value) -> tuple[Value, Value]:
    return c.log(c.sigmoid(x)), c.exp(c.neg(c.fn("abs", x)))


@row("aten.log_sigmoid_backward.default", means="g (1 - sigmoid(x))")
def log_sigmoid_backward(c: Call, g: Value, x: Value, _: Any) -> Value:
    return c.sub(g, c.mul(g, c.sigmoid(x)))


@row("aten.glu.default", means="a sigmoid(b), of the two halves of x")
def glu(c: Call, x: Value, dim: int = -1) -> Value:
    dim %= len(x.shape)
    half = c.size(x, dim) // 2
    return c.mul(c.cut(x, dim, 0, half), c.sigmoid(c.cut(x, dim, half, 2 * half)))


@row("aten.glu_backward.default", means="(g s, g a s (1 - s)), s = sigmoid(b)")
def glu_backward(c: Call, g: Value, x: Value, dim: int) -> Value:
    dim %= len(x.shape)
    half = c.size(x, dim) // 2
    gate = c.sigmoid(c.cut(x, dim, half, 2 * half))
    first = c.mul(g, gate)
    return c.concat([first, c.mul(c.mul(first, c.cut(x, dim, 0, half)), c.sub(c.ones(gate.shape), gate))], dim)


@row("aten._prelu_kernel.default", means="x where x > 0, else w x")
def prelu(c: Call, x: Value, w: Value) -> Value:
    return c.choose(c.fn("positive", x), x, c.mul(*c.broadcast(x, w)))


@row("aten._prelu_kernel_backward.default", means="(g or g w, 0 or g x)")
def prelu_backward(c: Call, g: Value, x: Value, w: Value) -> tuple[Value, Value]:
    above = c.fn("positive", x)
    return c.choose(above, g, c.mul(*c.broadcast(g, w))), c.choose(above, 0, c.mul(g, x))
