"""Who holds which part of a tensor: plain data, for pictures of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphguard.ir import SHORT_DTYPES, Mesh

Span = tuple[int, int]
Tile = tuple[Span, ...]  # one span per dim


@dataclass(frozen=True)
class Holding:
    """How the ranks hold a tensor of the sequential program.

    name: what the tensor is in the program of the ranks. role: "held", or "expected" for what `outputs=` states.
    shape: of the whole. mesh: of the ranks that hold it; `ranks` lists them row-major. placements: one per axis of that mesh.
    factor: what they hold is this multiple of what the placements say; None for 1.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    mesh: Mesh
    ranks: tuple[int, ...]
    placements: tuple[str, ...]
    factor: str | None = None
    role: str = "held"
    of: str = ""  # the name of the sequential tensor in its graph

    @property
    def type(self) -> str:
        """As in `f32[8, 64@tp]`."""
        dims = [str(size) for size in self.shape]
        for (axis, size), placement in zip(self.mesh.axes, self.placements, strict=True):
            if placement.startswith("Shard(") and size > 1:
                dims[int(placement[6:-1])] += f"@{axis}"
        partial = ",".join(self.summed_axes)
        return f"{SHORT_DTYPES.get(self.dtype, self.dtype)}[{', '.join(dims)}]" + (f" partial@{partial}" if partial else "")

    @property
    def summed_axes(self) -> list[str]:
        return [
            axis for axis, placement in zip(self.mesh.names, self.placements, strict=True) if placement.startswith("Partial")
        ]

    def tiles(self) -> dict[Tile, list[list[int]]]:
        """The parts of the tensor, each with its summands, each summand with the ranks that have equal copies of it."""
        found: dict[Tile, dict[tuple[int, ...], list[int]]] = {}
        for lane, rank in enumerate(self.ranks):
            place = self.mesh.coordinate(lane)
            summand = tuple(place[axis] for axis in self.summed_axes)
            found.setdefault(self._tile(place), {}).setdefault(summand, []).append(rank)
        return {tile: list(summands.values()) for tile, summands in sorted(found.items())}

    def _tile(self, place: dict[str, int]) -> Tile:
        """The part of a rank; uneven shards as torch.chunk makes them."""
        spans = [(0, size) for size in self.shape]
        for (axis, size), placement in zip(self.mesh.axes, self.placements, strict=True):
            if placement.startswith("Shard("):
                dim = int(placement[6:-1])
                low, high = spans[dim]
                step = -(-(high - low) // size)
                start = min(low + place[axis] * step, high)
                spans[dim] = (start, min(start + step, high))
        return tuple(spans)

    def to_plain(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "role": self.role,
            "type": self.type,
            "placements": dict(zip(self.mesh.names, self.placements, strict=True)),
            "factor": self.factor,
            "ranks": list(self.ranks),
        }
