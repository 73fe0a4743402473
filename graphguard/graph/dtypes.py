"""Classes of dtypes, by what their numbers do."""

from __future__ import annotations

CLASSES = {
    "f": "floats",
    "c": "complex numbers",
    "w": "whole numbers",  # of 32 or 64 bits, with a sign: they are taken not to overflow
    "n": "narrow whole numbers",  # all others, which do
    "b": "booleans",
}


def class_of(dtype: str) -> str:
    if dtype.startswith(("float", "bfloat")):
        return "f"
    if dtype.startswith("complex"):
        return "c"
    return "b" if dtype == "bool" else "w" if dtype in ("int32", "int64") else "n"


def is_narrow(dtype: str) -> bool:
    return class_of(dtype) == "n"
