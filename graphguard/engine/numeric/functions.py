"""What the named functions of descriptions compute, in numpy: for the evaluator alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

_erfc = np.vectorize(math.erfc, otypes=[float])
_lgamma = np.vectorize(lambda x: math.inf if x <= 0 and float(x).is_integer() else math.lgamma(x), otypes=[float])


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _softplus(x: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    beta = float(beta)
    return np.where(x * beta > float(threshold), x, np.log1p(np.exp(np.minimum(x * beta, 700))) / beta)


def _softplus_slope(x: Any, beta: Any, threshold: Any) -> Any:
    return np.where(x * float(beta) > float(threshold), 1.0, _sigmoid(x * float(beta)))


def _elu(x: Any, alpha: Any, scale: Any, input_scale: Any) -> Any:
    return float(scale) * np.where(x > 0, x, float(alpha) * np.expm1(x * float(input_scale)))


def _elu_slope(x: Any, alpha: Any, scale: Any, input_scale: Any) -> Any:
    below = float(alpha) * float(input_scale) * np.exp(x * float(input_scale))
    return float(scale) * np.where(x > 0, 1.0, below)


def _elu_slope_of_result(y: Any, alpha: Any, scale: Any, input_scale: Any) -> Any:
    return np.where(y > 0, float(scale), float(input_scale) * (y + float(alpha) * float(scale)))


def _clamp(x: Any, low: Any, high: Any) -> Any:
    return np.clip(x, None if low is None else float(low), None if high is None else float(high))


def _wrapped(x: Any, dtype: str) -> Any:
    return np.asarray(whole(x)).astype(np.int64).astype(dtype).astype(float)


def whole(x: Any) -> Any:
    """The whole number that a number is but for rounding: -3 (-5/3 + 1) is 2, in binary not quite."""
    with np.errstate(all="ignore"):
        nearest = np.round(x)
        return np.where(np.abs(x - nearest) < 1e-9, nearest, x)


def _is(condition: Any) -> Any:
    return np.asarray(condition, dtype=float)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    # arithmetic
    "pow": lambda x, p: np.power(x, float(p)),
    "power": np.power,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "lgamma": _lgamma,
    "inverse_or_zero": lambda x: np.where(x == 0, 0.0, 1 / np.where(x == 0, 1.0, x)),
    "abs": np.abs,
    "sign": np.sign,
    "floor": lambda x: np.floor(whole(x)),
    "ceil": lambda x: np.ceil(whole(x)),
    "round": np.round,
    "trunc": lambda x: np.trunc(whole(x)),
    "frac": lambda x: whole(x) - np.trunc(whole(x)),
    "wrapped": _wrapped,
    "narrowed": _wrapped,  # which is what the CPU does
    "floor_divide": lambda a, b: np.floor(whole(a / b)),
    "remainder": np.mod,
    "fmod": np.fmod,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "clamp": _clamp,
    "hypot": np.hypot,
    "xlogy": lambda a, b: np.where(a == 0, 0.0, a * np.log(b)),
    # angles
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "sinc": np.sinc,
    # masks
    "eq": lambda a, b: _is(whole(a) == whole(b)),
    "lt": lambda a, b: _is(whole(a) < whole(b)),
    "le": lambda a, b: _is(a <= b),
    "nonzero": lambda x: _is(x != 0),
    "positive": lambda x: _is(x > 0),
    "isnan": lambda x: _is(np.isnan(x)),
    "isinf": lambda x: _is(np.isinf(x)),
    # activations
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": _sigmoid,
    "normal_share": lambda x: 0.5 * _erfc(-x / math.sqrt(2)),
    "leaky_relu": lambda x, slope: np.where(x > 0, x, x * float(slope)),
    "leaky_relu_slope": lambda x, slope: np.where(x > 0, 1.0, float(slope)),
    "elu": _elu,
    "elu_slope": _elu_slope,
    "elu_slope_of_result": _elu_slope_of_result,
    "celu": lambda x, alpha: np.where(x > 0, x, float(alpha) * np.expm1(x / float(alpha))),
    "softplus": _softplus,
    "softplus_slope": _softplus_slope,
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "hardswish_slope": lambda x: np.where(x <= -3, 0.0, np.where(x < 3, x / 3 + 0.5, 1.0)),
    "hardsigmoid": lambda x: np.clip(x + 3, 0, 6) / 6,
    "hardsigmoid_slope": lambda x: _is((x > -3) & (x < 3)) / 6,
    "hardtanh_slope": lambda x, low, high: _is((x > float(low)) & (x < float(high))),
    "hardshrink": lambda x, width: np.where(np.abs(x) <= float(width), 0.0, x),
    "softshrink": lambda x, width: np.sign(x) * np.maximum(np.abs(x) - float(width), 0),
    "shrink_slope": lambda x, width: _is(np.abs(x) > float(width)),
}
