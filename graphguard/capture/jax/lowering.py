"""The walk over a jaxpr: every equation becomes ATen calls and communication, for all ranks of a class at once.

What follows from literals and places on the mesh is `Known`. Where ranks go different ways by it, `Diverged` says which, and
each part is walked by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from jax.extend import core

from graphguard.capture.jax.builder import Builder, per_rank
from graphguard.capture.jax.dtypes import MASK, in_graph, is_key, is_unsigned, numpy_of
from graphguard.capture.jax.intervals import Intervals
from graphguard.capture.jax.kernels import KernelLemma
from graphguard.capture.jax.known_arrays import MOST, Known, folded
from graphguard.capture.jax.mesh import Along
from graphguard.capture.jax.sources import is_backward, source_of
from graphguard.errors import CaptureError
from graphguard.graph.ir import Source, Value
from graphguard.graph.rank_class import Numbers, PerRank

Spec = tuple[tuple[str, ...], ...]  # by dim, the axes that split it


@dataclass(eq=False)
class Sharded:
    """What left a shard_map: a global array, of which each rank has its part."""

    spec: Spec
    local: Any
    shape: tuple[int, ...]
    dtype: str
    whole: Value | None = None


# Calls, into which arrays go as they lie on the ranks.
CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call",
         "custom_vjp_call_jaxpr", "custom_lin", "composite")  # fmt: skip
# What only moves elements; and the name of the rule for keys that it moves.
MOVES = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "rev", "slice", "split", "unstack", "stack",
         "concatenate", "dynamic_slice", "dynamic_update_slice", "gather", "select_n")  # fmt: skip
KEYS_MOVED = "keys moved"
OUTSIDE = "outside of shard_map, XLA splits what it computes over the devices without changing it"
Operand: TypeAlias = Value | Known | Sharded
Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers how primitives of these names become nodes."""

    def register(function: Rule) -> Rule:
        for name in names:
            if name in RULES:
                raise ValueError(f"{name} has two rules")
            RULES[name] = function
        return function

    return register


class Diverged(Exception):
    """Ranks go different ways. parts: by rank of the class, the number of its way."""

    def __init__(self, parts: Numbers):
        self.parts = parts


class Lowering:
    """One walk. `made` by rules are values; operands that are known may stay so."""

    def __init__(self, builder: Builder, kernels: Mapping[str, KernelLemma] | None = None):
        self.build = builder
        self.kernels = kernels or {}
        self.intervals = Intervals(builder)
        self.inside = 0  # of so many shard_maps

    # ------------------------------------------------------------------ the walk
    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = {}

        def read(atom: Any) -> Any:
            return self.literal(np.asarray(atom.val, dtype=atom.aval.dtype)) if isinstance(atom, core.Literal) else env[atom]

        for variable, const in zip(jaxpr.constvars, consts, strict=True):
            env[variable] = const if isinstance(const, Operand) else self.literal(_array_of(const))
        env.update(zip(jaxpr.invars, args, strict=True))
        for equation in jaxpr.eqns:
            results = self._lowered(equation, [read(atom) for atom in equation.invars])
            for variable, result in zip(equation.outvars, results, strict=True):
                env[variable] = result
        return [read(atom) for atom in jaxpr.outvars]

    def closed(self, closed: Any, args: Sequence[Any]) -> list[Any]:
        return self.run(closed.jaxpr, closed.consts, args)

    def _lowered(self, equation: Any, operands: list[Any]) -> list[Any]:
        """One equation. An error of its own names the primitive and the user's line."""
        self.build.source = source_of(equation) or self.build.source
        self.build.backward = is_backward(equation)
        source, name = self.build.source, equation.primitive.name
        try:
            if name not in (*CALLS, "shard_map"):
                operands = [self.whole(operand) for operand in operands]
            return self.applied(equation, operands)
        except _Located:
            raise
        except CaptureError as error:
            raise _Located(_sentence(name, source, error)) from None

    def applied(self, equation: Any, operands: list[Any]) -> list[Any]:
        """What a primitive gives: at once, if that is known, or by its rule."""
        results: list[Any] | None = self._folded(equation, operands)
        if results is None:
            lower = RULES.get(_rule_for(equation))
            if lower is None:
                raise CaptureError("it has no exact graph yet")
            if not self.inside and not self.build.is_sequential and equation.primitive.name not in (*CALLS, "shard_map"):
                self.build.assumptions.add(OUTSIDE)
            made = lower(self, equation, *operands)
            results = list(made) if equation.primitive.multiple_results else [made]
        return [self._typed(each, variable.aval) for each, variable in zip(results, equation.outvars, strict=True)]

    def _folded(self, equation: Any, operands: list[Any]) -> list[Known] | None:
        if len(equation.outvars) != 1 or not all(isinstance(operand, Known) for operand in operands):
            return None
        aval = equation.outvars[0].aval
        if is_key(getattr(aval, "dtype", "")):
            return None
        made = folded(equation.primitive.name, equation.params, tuple(getattr(aval, "shape", ())), operands)
        return None if made is None else [Known(self._cut(made.array, aval.dtype))]

    def _cut(self, array: Any, dtype: Any) -> Any:
        return (array & MASK).astype(np.int64) if is_unsigned(dtype) else array.astype(numpy_of(dtype))

    def _typed(self, result: Any, aval: Any) -> Any:
        """Of the shape and the dtype that JAX says: what a rule gets wrong is an error, never a graph."""
        if isinstance(result, Sharded) or not hasattr(aval, "shape"):
            return result
        shape = tuple(aval.shape)
        if is_key(aval.dtype):
            shape = (*shape, 2)
        if tuple(result.shape) != shape:
            raise CaptureError(f"it gives {tuple(result.shape)} here, not {shape}")
        if isinstance(result, Value) and result.dtype != in_graph(aval.dtype):
            result = self.build.aten("_to_copy", result, dtype=in_graph(aval.dtype))
        if isinstance(result, Value) and is_unsigned(aval.dtype):
            self.intervals.say(result, 0, MASK)
        return result

    # ------------------------------------------------------------------ what is known
    def literal(self, array: np.ndarray[Any, Any]) -> Operand:
        array = array.astype(numpy_of(array.dtype))
        return Known(array[None]) if array.size <= MOST else self.build.constant(array)

    def tensor(self, x: Any) -> Value:
        """As a value, which nodes can read."""
        if isinstance(x, Value):
            return x
        if isinstance(x, Sharded):
            return self.tensor(self.whole(x))
        flat = x.array.reshape(x.array.shape[0], -1)
        if flat.shape[1] and _all_equal(flat, flat[:, :1]):
            return self.full(x.shape, Known(flat[:, 0]))
        if _all_equal(flat, flat[:1]):
            return self.build.constant(np.ascontiguousarray(x.array[0]))
        parts = tuple(self.full((1,), Known(flat[:, place])) for place in range(flat.shape[1]))
        value: Value = self.build.aten("view", self.build.aten("cat", parts, 0), list(x.shape))
        return value

    def full(self, shape: Sequence[int], number: Known) -> Value:
        """A tensor of one number, which may be another one on each rank."""
        value, dtype = number.number(), number.dtype
        made: Value
        if isinstance(value, np.ndarray):
            whole = value.astype(np.int64)
            if not (whole == value.astype(np.float64)).all():
                raise CaptureError("a fraction that is another one on each rank has no exact graph yet; multiply by it later")
            made = self.build.aten("full", list(shape), per_rank(whole), dtype="int64")
            return self.build.aten("_to_copy", made, dtype=dtype)
        made = self.build.aten("full", list(shape), value, dtype=dtype)
        return made

    def scalar(self, x: Any) -> Any:
        """A number, where ATen takes one in the place of a second operand; else a tensor."""
        node = self.build.made.get(x) if isinstance(x, Value) else None
        if node is not None and node.op == "aten.full.default" and type(node.args[1]) in (int, float, PerRank):
            return node.args[1]
        if isinstance(x, Known) and x.size and x.dtype != "bool":
            flat = x.array.reshape(x.array.shape[0], -1)
            number = Known(flat[:, 0]).number() if _all_equal(flat, flat[:, :1]) else flat
            if not isinstance(number, np.ndarray):
                return number
        return self.tensor(x)

    # ------------------------------------------------------------------ global arrays
    def whole(self, x: Any) -> Any:
        """The global array on every rank."""
        if not isinstance(x, Sharded):
            return x
        if not any(x.spec):
            return x.local
        if x.whole is None:
            x.whole = self.tensor(x.local)
            for dim, axes in enumerate(x.spec):
                if axes:
                    x.whole = self.gathered(x.whole, Along(axes), dim, tiled=True)
        return x.whole

    def part(self, x: Any, spec: Spec) -> Any:
        """Each rank's part of a global array."""
        if isinstance(x, Sharded):
            if x.spec == spec:
                return x.local
            x = self.whole(x)
        for dim, axes in enumerate(spec):
            if axes:
                x = self.tensor(x)
                size = x.shape[dim] // self.build.places.size(Along(axes))
                x = self.slice(x, dim, self.build.place_in(Along(axes)) * size, size)
        return x

    def slice(self, x: Value, dim: int, starts: Numbers, size: int) -> Value:
        """So many elements of a dim, from one start, or from one per rank."""
        if size == x.shape[dim]:
            return x
        made: Value = self.build.aten("slice.Tensor", x, dim, per_rank(starts), per_rank(starts + size), 1)
        return made

    def gathered(self, x: Value, along: Along, dim: int, tiled: bool) -> Value:
        count = self.build.places.size(along)
        rows = self.view(x, [1, *x.shape])
        made = self.moved(self.build.collective("all_gather_into_tensor", rows, [count, *x.shape], along), 0, dim)
        return self.view(made, [*x.shape[:dim], count * x.shape[dim], *x.shape[dim + 1 :]]) if tiled else made

    # ------------------------------------------------------------------ shapes
    def view(self, x: Value, shape: Sequence[int]) -> Value:
        return x if list(x.shape) == list(shape) else self.build.aten("view", x, list(shape))

    def permuted(self, x: Value, order: Sequence[int]) -> Value:
        return x if list(order) == sorted(order) else self.build.aten("permute", x, list(order))

    def moved(self, x: Value, source: int, target: int) -> Value:
        order = [dim for dim in range(len(x.shape)) if dim != source]
        order.insert(target, source)
        return self.permuted(x, order)

    def cast(self, x: Value, dtype: str) -> Value:
        return x if x.dtype == dtype else self.build.aten("_to_copy", x, dtype=dtype)

    def wrapped(self, x: Value, dtype: Any) -> Value:
        """What was computed with unsigned numbers, cut to 32 bits."""
        return self.build.aten("bitwise_and.Scalar", x, MASK) if is_unsigned(dtype) else x


def _rule_for(equation: Any) -> str:
    """What only moves elements moves keys as the numbers that they are made of."""
    name: str = equation.primitive.name
    has_keys = name in MOVES and any(is_key(each.aval.dtype) for each in (*equation.invars, *equation.outvars))
    return KEYS_MOVED if has_keys else name


class _Located(CaptureError):
    """An error that names its line already."""


def _sentence(name: str, source: Source | None, error: CaptureError) -> str:
    where = f"{source}: " if source is not None else ""
    return f"{where}the primitive {name}: {error}"


def _array_of(const: Any) -> np.ndarray[Any, Any]:
    if is_key(getattr(const, "dtype", "")):
        import jax

        return np.asarray(jax.random.key_data(const))
    return np.asarray(const)


def _all_equal(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())
