"""Programs in JAX as jaxprs: traced with shapes alone, and what their arguments and results are called."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from graphguard.capture.jax.dtypes import is_key, is_unsigned
from graphguard.errors import CaptureError, GraphGuardError, ProgramError, UsageError, first_line


@dataclass(frozen=True)
class Argument:
    """A leaf of the arguments: its name, its shape, its dtype in JAX."""

    name: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def is_unsigned(self) -> bool:
        return is_unsigned(self.dtype) or is_key(self.dtype)


@dataclass(frozen=True)
class Traced:
    """A program: its jaxpr, and the paths of its results."""

    jaxpr: Any
    paths: tuple[str, ...]


def arguments_of(function: Callable[..., Any], args: Sequence[Any]) -> list[Argument]:
    """By leaf, named after the parameters of the function: `x`, `params.w1`."""
    found = []
    for name, arg in zip(_parameters(function, len(args)), args, strict=True):
        for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]:
            key = jax.tree_util.keystr(path, simple=True, separator=".")
            full = ".".join(part for part in (name, key) if part)
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise UsageError(
                    f"args= has {type(leaf).__name__} as {full}; write jax.ShapeDtypeStruct(shape, dtype) for each array"
                )
            found.append(Argument(full, tuple(leaf.shape), leaf.dtype))
    names = [each.name for each in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"args= has two arrays of the name {twice!r}; rename one")
    return found


def _parameters(function: Callable[..., Any], count: int) -> list[str]:
    try:
        known = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin has no signature
        known = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [each.name for each in known if each.kind in kinds][:count]
    return named + [f"arg{place}" for place in range(len(named), count)]


def trace(function: Callable[..., Any], args: Sequence[Any], side: str) -> Traced:
    """Twice, as a program that is another one each time has no graph."""
    one, other = _once(function, args, side), _once(function, args, side)
    if _text(one) != _text(other):
        raise CaptureError(
            f"the {side} program is not deterministic: two traces of it differ; remove what changes between them"
        )
    return one


def _once(function: Callable[..., Any], args: Sequence[Any], side: str) -> Traced:
    shapes = jax.tree_util.tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tuple(args))
    try:
        fresh = lambda *args: function(*args)  # noqa: E731 # JAX would not trace the same function twice
        jaxpr, results = jax.make_jaxpr(fresh, return_shape=True)(*shapes)
    except GraphGuardError:
        raise
    except Exception as error:
        raise _of_program(error, side) from None
    leaves = jax.tree_util.tree_flatten_with_path(results)[0]
    return Traced(jaxpr, tuple(jax.tree_util.keystr(path, simple=True, separator=".") or "out" for path, _ in leaves))


def _text(traced: Traced) -> tuple[str, list[bytes]]:
    return str(traced.jaxpr), [_bytes(const) for const in traced.jaxpr.consts]


def _bytes(const: Any) -> bytes:
    if is_key(getattr(const, "dtype", "")):
        const = jax.random.key_data(const)
    return np.asarray(const).tobytes()


def _of_program(error: Exception, side: str) -> ProgramError:
    """What the user's program raised, with the lines that are not JAX's."""
    hidden = (jax.__path__[0], __file__)
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(hidden)]
    kept = tuple((each.filename, each.lineno or 0, each.name) for each in frames)
    return ProgramError(f"the {side} program raised {type(error).__name__}: {first_line(error)}", kept)
