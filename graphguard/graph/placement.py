"""How the ranks along an axis of the mesh hold a tensor, and what follows from it: tiles, candidates, types. No torch.

`str` of a placement is what reports say, `Shard(1)`; `repr` is what torch writes, `Shard(dim=1)`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from graphguard.graph.ir import SHORT_DTYPES, Mesh


@dataclass(frozen=True)
class Replicate:
    """Every rank has the whole."""

    def __str__(self) -> str:
        return "Replicate"


@dataclass(frozen=True)
class Shard:
    """Every rank has its piece along a dim, as torch.chunk cuts them."""

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True)
class Partial:
    """Every rank has a tensor of the whole's shape; reduced over the ranks they are the whole."""

    reduce: str = "sum"

    def __repr__(self) -> str:
        return f"Partial({self.reduce})"


@dataclass(frozen=True)
class StridedShard:
    """Every rank has its piece of each of `factor` equal blocks along a dim. A DTensor may say so; no relation does."""

    dim: int
    factor: int

    def __repr__(self) -> str:
        return f"_StridedShard(dim={self.dim}, sf={self.factor})"


Placement: TypeAlias = Replicate | Shard | Partial
Placements = tuple[Placement, ...]  # one per axis of a mesh
REPLICATE, SUM = Replicate(), Partial("sum")
REDUCTIONS = ("sum", "avg", "max", "min")  # of relations; but for sums they are stated, never inferred

_SHARD = re.compile(r"Shard\((?:dim=)?(-?\d+)\)")
_PARTIAL = re.compile(r"Partial\((\w+)\)")
_STRIDED_SHARD = re.compile(r"_StridedShard\(dim=(-?\d+), sf=(\d+)\)")


def read(text: str) -> Placement | StridedShard | None:
    """As torch or a report writes it; None for a kind of which nothing is known."""
    if text in (str(REPLICATE), repr(REPLICATE)):
        return REPLICATE
    if shard := _SHARD.fullmatch(text):
        return Shard(int(shard[1]))
    if partial := _PARTIAL.fullmatch(text):
        return Partial(partial[1])
    strided = _STRIDED_SHARD.fullmatch(text)
    return StridedShard(int(strided[1]), int(strided[2])) if strided else None


def parse(texts: Iterable[str]) -> Placements:
    """Those of a relation."""
    found = []
    for text in texts:
        placement = read(text)
        if not isinstance(placement, Placement):
            raise ValueError(f"{text!r} is not the placement of a relation")
        found.append(placement)
    return tuple(found)


# ---------------------------------------------------------------------- sums
def partial_axes(placements: Placements) -> list[int]:
    """The axes over which something is reduced."""
    return [axis for axis, placement in enumerate(placements) if isinstance(placement, Partial)]


def has_partial(placements: Placements) -> bool:
    return bool(partial_axes(placements))


# ---------------------------------------------------------------------- tiles
Span = tuple[int, int]
Spans = tuple[Span, ...]  # by dim, where a tile begins and ends


def piece(size: int, index: int, count: int) -> Span:
    """torch.chunk's piece of a dim; ranks beyond the last piece have an empty one, as DTensor's have."""
    step = -(-size // count)
    start = min(index * step, size)
    return start, min(start + step, size)


def spans_of(shape: Sequence[int], mesh: Mesh, placements: Placements, lane: int) -> Spans:
    """The tile of a lane of the mesh; two axes that shard one dim nest left to right."""
    coordinate = mesh.coordinate(lane)
    spans = [(0, size) for size in shape]
    for (axis, size), placement in zip(mesh.axes, placements, strict=True):
        if isinstance(placement, Shard):
            low, high = spans[placement.dim]
            start, stop = piece(high - low, coordinate[axis], size)
            spans[placement.dim] = low + start, low + stop
    return tuple(spans)


# ---------------------------------------------------------------------- all that there are
def candidates(rank: int, mesh: Mesh, sums: bool = True) -> list[Placements]:
    """All placements of a tensor with so many dims, those without sums first; other reductions are stated, never inferred."""
    kinds: list[Placement] = [REPLICATE, *map(Shard, range(rank)), *([SUM] if sums else [])]
    every = itertools.product(*(kinds if size > 1 else kinds[:1] for size in mesh.shape))
    return sorted(every, key=lambda placements: (placements.count(SUM), -placements.count(REPLICATE)))


def on_mesh(placements: Placements, mesh: Mesh) -> Placements:
    """Along an axis of one rank nothing is placed."""
    return tuple(p if size > 1 else REPLICATE for p, size in zip(placements, mesh.shape, strict=True))


# ---------------------------------------------------------------------- in print
def type_text(dtype: str, shape: Sequence[int], mesh: Mesh, placements: Placements) -> str:
    """As in `f32[8, 64@tp]`."""
    dims = [str(size) for size in shape]
    for (axis, size), placement in zip(mesh.axes, placements, strict=True):
        if isinstance(placement, Shard) and size > 1:
            dims[placement.dim] += f"@{axis}"
    reduced: dict[str, list[str]] = {}
    for axis, placement in zip(mesh.names, placements, strict=True):
        if isinstance(placement, Partial):
            reduced.setdefault("partial" if placement.reduce == "sum" else placement.reduce, []).append(axis)
    words = "".join(f" {how}@{','.join(axes)}" for how, axes in reduced.items())
    return f"{SHORT_DTYPES.get(dtype, dtype)}[{', '.join(dims)}]{words}"
