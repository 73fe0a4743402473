"""The input relation: how each rank's inputs come from the sequential ones. Stated by placements or by plain torch code."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from graphguard.capture.front import Bounds
from graphguard.errors import UsageError
from graphguard.graph import placement as own
from graphguard.graph.ir import Mesh

Coordinate = dict[str, int]
MOST_ELEMENTS = 1 << 60
_Placed: TypeAlias = Placement | own.Placement
Placements: TypeAlias = _Placed | Mapping[str, _Placed] | Sequence[_Placed]
Local = Callable[[torch.Tensor, Coordinate], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Input:
    """One sequential input and its relation to the ranks' inputs.

    shape: the full shape.
    placement: one placement, `{axis: placement}`, or a tuple in mesh order.
    low, high: bounds of the values, `low <= v < high`.
    local: `fn(full, coord)`, any other layout in plain torch; traced, not run on data.
    values: what it holds on every path, where the programs read values; left out, it is drawn for each.
    """

    shape: tuple[int, ...]
    placement: Placements
    dtype: torch.dtype
    low: float | None
    high: float | None
    local: Local | None
    values: torch.Tensor | None

    def __init__(
        self,
        shape: Sequence[int],
        placement: Placements = Replicate(),  # noqa: B008 - a placement is a frozen value
        dtype: torch.dtype = torch.float32,
        *,
        low: float | None = None,
        high: float | None = None,
        local: Local | None = None,
        values: Any = None,
    ):
        sizes = _sizes(shape)
        if isinstance(placement, torch.dtype):
            raise UsageError(f"gg.Input: {placement} is given as the placement; write dtype={placement}")
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"gg.Input: {dtype!r} is not a dtype; write for example torch.int64")
        if local is not None and not callable(local):
            raise UsageError(f"gg.Input: local= is {type(local).__name__}, not a function of (full, coord)")
        if local is not None and not isinstance(placement, Replicate):
            raise UsageError("gg.Input: give a placement or local=, not both")
        low, high = _bound("low", low), _bound("high", high)
        whole = not (dtype.is_floating_point or dtype.is_complex)
        if low is not None and high is not None and (low >= high or (whole and math.ceil(low) >= high)):
            raise UsageError(f"gg.Input: no {'whole number' if whole else 'value'} v has {low} <= v < {high}")
        fields = {"shape": sizes, "placement": placement, "dtype": dtype, "low": low, "high": high, "local": local}
        fields["values"] = None if values is None else _values(values, sizes, dtype)
        for name, value in fields.items():
            object.__setattr__(self, name, value)


def _sizes(shape: Any) -> tuple[int, ...]:
    given = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    try:
        sizes = tuple(operator.index(size) for size in given)
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes) or any(isinstance(size, bool) for size in given):
        raise UsageError(f"gg.Input: the shape {shape!r} is not a tuple of sizes")
    if math.prod(sizes) > MOST_ELEMENTS:
        raise UsageError(f"gg.Input: a tensor of shape {sizes} has more elements than torch can count")
    return sizes


def _values(given: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    try:
        values = torch.as_tensor(given).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"gg.Input: values= is {type(given).__name__}; write a tensor") from None
    if tuple(values.shape) != shape:
        raise UsageError(f"gg.Input: values= has the shape {tuple(values.shape)}, and the input {shape}")
    held = values.to(dtype)
    if not torch.equal(held.to(values.dtype), values) and not values.is_floating_point():
        raise UsageError(f"gg.Input: values= holds numbers that {dtype} does not")
    return held.clone()


def _bound(name: str, bound: Any) -> Any:
    """A bound that some number has, as it was given; an infinite one is none."""
    if bound is None:
        return None
    if isinstance(bound, bool) or not isinstance(bound, Real) or bound != bound:
        raise UsageError(f"gg.Input: {name}= is {bound!r}; write a number")
    if math.isinf(bound):
        return None
    if abs(float(bound)) > 2.0**63:
        raise UsageError(f"gg.Input: {name}={bound} is beyond what 64 bits hold")
    return bound


def placement_of(item: Any) -> own.Placement | None:
    """What torch's placement says; None for anything else. One of our own stands for itself."""
    if type(item) is Shard:
        return own.Shard(item.dim)
    if type(item) is Partial:
        return own.Partial(item.reduce_op)
    if type(item) is Replicate:
        return own.REPLICATE
    return item if isinstance(item, own.Placement) else None


def placements_by_axis(name: str, placement: Placements, mesh: Mesh) -> dict[str, own.Placement]:
    """One placement per mesh axis, checked."""
    if isinstance(placement, Mapping):
        unknown = [axis for axis in placement if axis not in mesh.names]
        if unknown:
            raise UsageError(f"input {name!r} is placed on the axis {unknown[0]!r}; the mesh has {list(mesh.names)}")
        by_axis = {axis: placement.get(axis, own.REPLICATE) for axis in mesh.names}
    elif isinstance(placement, (tuple, list)):
        if len(placement) != len(mesh.names):
            raise UsageError(f"input {name!r} has {len(placement)} placements for {len(mesh.names)} mesh axes")
        by_axis = dict(zip(mesh.names, placement, strict=True))
    else:
        if len(mesh.names) > 1 and placement_of(placement) != own.REPLICATE:
            raise UsageError(
                f"input {name!r}: on a mesh of several axes write {{axis: placement}} or one placement per axis, "
                f"not {placement!r}"
            )
        by_axis = dict.fromkeys(mesh.names, placement)
    found = {}
    for axis, item in by_axis.items():
        known = placement_of(item)
        if known is None:
            raise UsageError(f"input {name!r} has {item!r} on axis {axis!r}; use Replicate(), Shard(dim) or Partial()")
        found[axis] = known
    return found


def check_placements(name: str, spec: Input, mesh: Mesh) -> None:
    for placement in placements_by_axis(name, spec.placement, mesh).values():
        if isinstance(placement, own.Shard) and not -len(spec.shape) <= placement.dim < len(spec.shape):
            raise UsageError(f"input {name!r}: Shard({placement.dim}) names a dim that its shape {spec.shape} does not have")
        if isinstance(placement, own.Partial) and placement.reduce != "sum":
            raise UsageError(f"input {name!r}: an input may be a Partial sum only, not {placement.reduce!r}")


def localise(
    name: str,
    full: torch.Tensor,
    spec: Input,
    mesh: Mesh,
    coordinate: Coordinate,
    part: Callable[[torch.Tensor, str, int, int], torch.Tensor],
) -> torch.Tensor:
    """A rank's input. `part(tensor, key, index, count)` gives one of `count` summands; equal keys give the same summands."""
    if spec.local is not None:
        local: Any = spec.local(full, dict(coordinate))
        if not isinstance(local, torch.Tensor):
            raise UsageError(f"input {name!r}: local= returned {type(local).__name__}, not a tensor")
        return local
    tensor, before = full, list[str]()
    for axis, placement in placements_by_axis(name, spec.placement, mesh).items():
        index, count = coordinate[axis], dict(mesh.axes)[axis]
        if isinstance(placement, own.Shard):
            tensor = chunk(tensor, placement.dim, index, count)
        elif isinstance(placement, own.Partial):
            key = "/".join([name, *(f"{each}={coordinate[each]}" for each in before), axis])
            tensor = part(tensor, key, index, count)
        if placement != own.REPLICATE:
            before.append(axis)
    return tensor


def chunk(tensor: torch.Tensor, dim: int, index: int, count: int) -> torch.Tensor:
    """A rank's piece along a dim."""
    size = tensor.shape[dim]
    if size % count == 0:  # arithmetic alone, which holds for many ranks at once
        return tensor.narrow(dim, index * (size // count), size // count)
    start, stop = own.piece(size, index, count)
    return tensor.narrow(dim, start, stop - start)


def bounds_of(inputs: Mapping[str, Input]) -> dict[str, Bounds]:
    """The stated bounds of all inputs."""
    return {name: (spec.low, spec.high) for name, spec in inputs.items()}


def upper_bounds(inputs: Mapping[str, Input]) -> dict[str, int]:
    """Of inputs of whole numbers that are stated not to be negative, what they are below."""
    return {
        name: math.ceil(spec.high)
        for name, spec in inputs.items()
        if spec.low is not None and spec.low >= 0 and spec.high is not None and not spec.dtype.is_floating_point
    }


def is_a_part(name: str, spec: Input, mesh: Mesh) -> bool:
    """Whether a rank's input holds elements of the whole one, and nothing else."""
    placements = placements_by_axis(name, spec.placement, mesh).values()
    return spec.local is None and not any(isinstance(placement, own.Partial) for placement in placements)
