"""Small tensors that no input decides: what follows from literals and places on the mesh is computed here, a row per rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphguard.graph.rank_class import PerRank

MOST = 16  # elements of a tensor that is computed here; larger ones are left to the graph
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Known:
    """`array` has the ranks in front; one row stands for all of them. Unsigned numbers of 32 bits are in 64."""

    array: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape[1:])

    @property
    def dtype(self) -> str:
        return str(self.array.dtype)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def is_same(self) -> bool:
        """Whether all ranks have the same."""
        return bool((self.array == self.array[:1]).all())

    @property
    def numbers(self) -> Array:
        """Of a tensor of one element: by rank, the number."""
        return self.array.reshape(self.array.shape[0])

    def number(self) -> Any:
        """Of a tensor of one element: a Python number, or one per rank."""
        first = self.numbers[0].item()
        if all(each == first or (each != each and first != first) for each in self.numbers):
            return first
        return PerRank(self.numbers) if self.array.dtype.kind in "iub" else self.numbers

    def uniform(self) -> Any:
        """The one number that all elements are on all ranks; None if there is none."""
        first = self.array.flat[0].item() if self.array.size else None
        return first if first is not None and bool((self.array == first).all()) else None


def folded(name: str, params: Any, shape: tuple[int, ...], operands: list[Known]) -> Known | None:
    """What an operation gives; None if it is not one that is computed here, or not in one way. `params` are those of JAX."""
    compute = _COMPUTED.get(name)
    if compute is None or not operands or int(np.prod(shape, dtype=np.int64)) > MOST:
        return None
    rows = max(each.array.shape[0] for each in operands)
    with np.errstate(all="ignore"):
        made = compute(params, shape, *(each.array for each in operands))
    if made is None:
        return None
    made = np.asarray(made)
    return Known(np.broadcast_to(made, (made.shape[0] if made.ndim else rows, *shape)))


# ---------------------------------------------------------------------- operations
_Compute = Callable[..., Array | None]
_COMPUTED: dict[str, _Compute] = {}


def _plain(function: Callable[..., Any]) -> _Compute:
    """Elementwise: JAX lets a scalar stand beside a tensor."""

    def compute(params: Any, shape: tuple[int, ...], *arrays: Array) -> Array | None:
        made: Array | None = function(*(x.reshape(x.shape[0], *[1] * len(shape)) if x.ndim == 1 else x for x in arrays))
        return made

    return compute


def _divided(a: Array, b: Array) -> Array | None:
    if a.dtype.kind not in "iu":
        return np.asarray(a / b)
    return None if (b == 0).any() else np.asarray(np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(a.dtype)


def _remainder(a: Array, b: Array) -> Array | None:
    return None if (b == 0).any() else np.fmod(a, b)


def _broadcast(params: Any, shape: tuple[int, ...], x: Array) -> Array:
    dims = params["broadcast_dimensions"]
    sizes = [x.shape[1 + dims.index(dim)] if dim in dims else 1 for dim in range(len(shape))]
    return np.broadcast_to(x.reshape(x.shape[0], *sizes), (x.shape[0], *shape))


def _reshaped(params: Any, shape: tuple[int, ...], x: Array) -> Array:
    return x.reshape(x.shape[0], *shape)


def _joined(params: Any, shape: tuple[int, ...], *arrays: Array) -> Array:
    rows = max(each.shape[0] for each in arrays)
    return np.concatenate([np.broadcast_to(x, (rows, *x.shape[1:])) for x in arrays], params["dimension"] + 1)


def _sliced(params: Any, shape: tuple[int, ...], x: Array) -> Array:
    cuts = zip(params["start_indices"], params["limit_indices"], params["strides"] or [1] * len(shape), strict=True)
    return x[(slice(None), *(slice(*cut) for cut in cuts))]


def _dynamically_sliced(params: Any, shape: tuple[int, ...], x: Array, *starts: Array) -> Array:
    rows = max(each.shape[0] for each in (x, *starts))
    found = []
    for row in range(rows):
        own, *begins = (each[row if each.shape[0] > 1 else 0] for each in (x, *starts))
        begins = [int(np.clip(begin, 0, size - want)) for begin, size, want in zip(begins, own.shape, shape, strict=True)]
        found.append(own[tuple(slice(begin, begin + want) for begin, want in zip(begins, shape, strict=True))])
    return np.stack(found)


def _whole_power(params: Any, shape: tuple[int, ...], x: Array) -> Array | None:
    return x ** params["y"] if params["y"] >= 0 or x.dtype.kind == "f" else None


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "div": _divided, "rem": _remainder,
    "max": np.maximum, "min": np.minimum, "neg": np.negative, "sign": np.sign, "abs": np.abs, "floor": np.floor,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "square": np.square,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": lambda which, *cases: np.where(which, cases[1], cases[0]) if len(cases) == 2 else None,
    **dict.fromkeys(("copy", "copy_p", "pvary", "reshard", "stop_gradient", "name"), lambda x: x),
}  # fmt: skip
_COMPUTED |= {name: _plain(function) for name, function in _ELEMENTWISE.items()}
_COMPUTED |= {
    "integer_pow": _whole_power, "broadcast_in_dim": _broadcast, "concatenate": _joined, "slice": _sliced,
    "dynamic_slice": _dynamically_sliced, **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshaped),
}  # fmt: skip
