"""Random bits: JAX's own threefry, in whole numbers. A key is its two numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax._src.random.prng import iterated_vmap_binary_bcast, iterated_vmap_unary

from graphguard.capture.jax.dtypes import MASK, is_key
from graphguard.capture.jax.known_arrays import Known
from graphguard.capture.jax.lowering import KEYS_MOVED, Lowering, rule
from graphguard.errors import CaptureError


@rule("random_wrap", "random_unwrap", "random_clone")
def same_numbers(low: Lowering, equation: Any, key: Any) -> Any:
    return key


@rule(KEYS_MOVED)
def moved(low: Lowering, equation: Any, *operands: Any) -> Any:
    """The same for both numbers of the keys, which are the last dim: JAX's own rule for one dim more."""
    avals = [each.aval for each in equation.invars]
    axes = tuple(-1 if is_key(aval.dtype) else None for aval in avals)
    bound = partial(equation.primitive.bind, **equation.params)
    closed = jax.make_jaxpr(jax.vmap(bound, in_axes=axes, out_axes=-1))(*map(_numbers, avals))
    results = low.closed(closed, operands)
    return results if equation.primitive.multiple_results else results[0]


@rule("random_seed")
def seeded(low: Lowering, equation: Any, seeds: Any) -> Any:
    return _each(low, equation, lambda seed: _impl(equation).seed(seed), seeds)


@rule("random_split")
def split(low: Lowering, equation: Any, keys: Any) -> Any:
    shape = tuple(equation.params["shape"])
    return _each(low, equation, lambda key: _impl(equation).split(key, shape), keys)


@rule("random_fold_in")
def folded_in(low: Lowering, equation: Any, keys: Any, data: Any) -> Any:
    return _each(low, equation, lambda key, each: _impl(equation).fold_in(key, each), keys, data)


@rule("random_bits")
def bits(low: Lowering, equation: Any, keys: Any) -> Any:
    width, shape = equation.params["bit_width"], tuple(equation.params["shape"])
    if width != 32:
        raise CaptureError(f"random numbers of {width} bits have no exact graph yet")
    return _each(low, equation, lambda key: _impl(equation).random_bits(key, width, shape), keys)


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
    impl = next(aval.dtype._impl for aval in avals if is_key(aval.dtype))
    if impl.tag != "fry":
        raise CaptureError(f"keys of the kind {impl.name} have no exact graph yet; use threefry")
    return impl


def _each(low: Lowering, equation: Any, function: Callable[..., Any], *operands: Any) -> Any:
    """The function of one key, or of each of several: JAX's own code for them, which is traced."""
    avals = [each.aval for each in equation.invars]
    shapes = [tuple(aval.shape) for aval in avals]
    if len(shapes) == 2:
        mapped = iterated_vmap_binary_bcast(shapes[0], shapes[1], function)
    else:
        mapped = iterated_vmap_unary(len(shapes[0]), function)
    closed = jax.make_jaxpr(mapped)(*map(_numbers, avals))
    (result,) = low.run(closed.jaxpr, [np.asarray(const) for const in closed.consts], operands)
    return result if not isinstance(result, Known) else low.tensor(result)


def _numbers(aval: Any) -> Any:
    """A key is two numbers."""
    if is_key(aval.dtype):
        return jax.ShapeDtypeStruct((*aval.shape, 2), np.uint32)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
