"""What the named functions and operators of descriptions compute, in numpy: for the evaluator alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

_erf = np.vectorize(math.erf, otypes=[float])


def _gelu(x: Any, approximate: str) -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


def _gelu_slope(x: Any, approximate: str) -> Any:
    if approximate == "tanh":
        k = math.sqrt(2 / math.pi)
        t = np.tanh(k * (x + 0.044715 * x**3))
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x**2)
    return 0.5 * (1 + _erf(x / math.sqrt(2))) + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _number(parameter: Any) -> float:
    return -math.inf if parameter == "-inf" else math.inf if parameter == "inf" else float(parameter)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "relu": lambda x: np.maximum(x, 0),
    "exp": np.exp,
    "log": np.log,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "gelu": _gelu,
    "gelu_slope": _gelu_slope,
    "pow": lambda x, p: np.power(x, float(p)),
    "power": np.power,
    "abs": np.abs,
    "sin": np.sin,
    "cos": np.cos,
    "erf": _erf,
    "sign": np.sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,
    "trunc": np.trunc,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "eq": lambda a, b: np.asarray(a == b, dtype=float),
    "lt": lambda a, b: np.asarray(a < b, dtype=float),
    "le": lambda a, b: np.asarray(a <= b, dtype=float),
    "nonzero": lambda x: np.asarray(x != 0, dtype=float),
    "positive": lambda x: np.asarray(x > 0, dtype=float),
    "clamp": lambda x, low, high: np.clip(x, None if low is None else float(low), None if high is None else float(high)),
    "floor_divide": lambda a, b: np.floor(a / b),
    "remainder": lambda a, b: np.mod(a, b),
    "number": lambda p: _number(p),
    "times": lambda a, b: np.where(b == 0, 0.0, a * b),
}

OPERATORS: dict[str, Callable[..., Any]] = {}
