"""Random bits: JAX's own threefry, in whole numbers. A key is its two numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from graphguard.capture.jax.dtypes import MASK
from graphguard.capture.jax.known_arrays import Known
from graphguard.capture.jax.lowering import Lowering, rule
from graphguard.errors import CaptureError

_KEY = jax.ShapeDtypeStruct((2,), np.uint32)


@rule("random_wrap", "random_unwrap", "random_clone")
def same_numbers(low: Lowering, equation: Any, key: Any) -> Any:
    return key


@rule("random_seed")
def seeded(low: Lowering, equation: Any, seeds: Any) -> Any:
    aval = equation.invars[0].aval
    return _each(low, equation, lambda seed: _impl(equation).seed(seed), [seeds], [jax.ShapeDtypeStruct((), aval.dtype)])


@rule("random_split")
def split(low: Lowering, equation: Any, keys: Any) -> Any:
    shape = tuple(equation.params["shape"])
    return _each(low, equation, lambda key: _impl(equation).split(key, shape), [keys], [_KEY])


@rule("random_fold_in")
def folded_in(low: Lowering, equation: Any, keys: Any, data: Any) -> Any:
    number = jax.ShapeDtypeStruct((), equation.invars[1].aval.dtype)
    return _each(low, equation, lambda key, each: _impl(equation).fold_in(key, each), [keys, data], [_KEY, number])


@rule("random_bits")
def bits(low: Lowering, equation: Any, keys: Any) -> Any:
    width, shape = equation.params["bit_width"], tuple(equation.params["shape"])
    if width != 32:
        raise CaptureError(f"random numbers of {width} bits have no exact graph yet")
    return _each(low, equation, lambda key: _impl(equation).random_bits(key, width, shape), [keys], [_KEY])


@rule("threefry2x32")
def threefry(low: Lowering, equation: Any, *operands: Any) -> list[Any]:
    from jax._src.random.threefry2x32 import _threefry2x32_lowering

    shapes = tuple(jax.ShapeDtypeStruct(each.aval.shape, np.uint32) for each in equation.invars)
    rounds = _traced(_threefry2x32_lowering, shapes)
    return low.run(rounds.jaxpr, rounds.consts, operands)


@rule("iota_2x32_shape")
def counted(low: Lowering, equation: Any) -> list[Any]:
    """The elements of a shape, counted in row-major order by two numbers of 32 bits."""
    shape = list(equation.params["shape"])
    count = math.prod(shape)
    if count > MASK:
        raise CaptureError("so many random numbers have no exact graph yet")
    zero = Known(np.zeros(1, dtype=np.int64))
    return [low.full(shape, zero), low.view(low.build.aten("arange", count, dtype="int64"), shape)]


@lru_cache(maxsize=64)
def _traced(function: Callable[..., Any], shapes: tuple[Any, ...]) -> Any:
    return jax.make_jaxpr(lambda *args: function(*args, use_rolled_loops=False))(*shapes)


def _impl(equation: Any) -> Any:
    """How keys of this kind are used: JAX's own code, which is traced."""
    avals = [each.aval for each in (*equation.invars, *equation.outvars)]
    impl = next(aval.dtype._impl for aval in avals if str(aval.dtype).startswith("key<"))
    if impl.tag != "fry":
        raise CaptureError(f"keys of the kind {impl.name} have no exact graph yet; use threefry")
    return impl


def _each(low: Lowering, equation: Any, function: Callable[..., Any], operands: list[Any], avals: list[Any]) -> Any:
    """The function of one key; of several, one after the other."""
    if equation.invars[0].aval.shape:
        raise CaptureError("of several keys at once it has no exact graph yet; write a loop over them")
    closed = jax.make_jaxpr(function)(*avals)
    (result,) = low.run(closed.jaxpr, [np.asarray(const) for const in closed.consts], operands)
    return result if not isinstance(result, Known) else low.tensor(result)
