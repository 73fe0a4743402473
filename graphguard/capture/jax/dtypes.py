"""Which dtype of the graph stands for one of JAX.

Unsigned numbers of 32 bits, of which random keys are made, are whole numbers of 64 bits, and what is computed is cut to 32:
so they wrap in the graph as they do in XLA.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from graphguard.errors import CaptureError

UNSIGNED, CARRIER, MASK = "uint32", "int64", 0xFFFFFFFF
_KEPT = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
         "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")  # fmt: skip


def in_graph(dtype: Any) -> str:
    name = str(dtype)
    if name == UNSIGNED or is_key(dtype):
        return CARRIER
    if name not in _KEPT:
        raise CaptureError(f"the dtype {name} has no exact graph")
    return name


def is_unsigned(dtype: Any) -> bool:
    return str(dtype) == UNSIGNED


def is_key(dtype: Any) -> bool:
    """Of `jax.random.key`: two numbers of 32 bits."""
    return str(dtype).startswith("key<")


def is_float(dtype: Any) -> bool:
    return str(dtype).startswith(("float", "bfloat"))


def is_whole(dtype: Any) -> bool:
    return str(dtype).startswith(("int", "uint"))


def numpy_of(dtype: Any) -> np.dtype[Any]:
    """What numpy calls the dtype that stands for one of JAX."""
    name = in_graph(dtype)
    return np.dtype(getattr(ml_dtypes, name) if name.startswith(("bfloat", "float8")) else name)
