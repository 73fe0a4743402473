"""Who holds which part of a tensor: plain data, for pictures of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphguard.graph.ir import Mesh
from graphguard.graph.placement import Partial, Placements, Spans, partial_axes, spans_of, type_text


@dataclass(frozen=True)
class TensorLayout:
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
    placements: Placements
    factor: str | None = None
    role: str = "held"
    of: str = ""  # the name of the sequential tensor in its graph

    @property
    def type(self) -> str:
        """As in `f32[8, 64@tp]`."""
        return type_text(self.dtype, self.shape, self.mesh, self.placements)

    @property
    def summed_axes(self) -> list[str]:
        return [self.mesh.names[axis] for axis in partial_axes(self.placements)]

    @property
    def reduce(self) -> str:
        """How the summands of a tile are put together; a sum, if it is not one way for all axes."""
        found = {placement.reduce for placement in self.placements if isinstance(placement, Partial)}
        return found.pop() if len(found) == 1 else "sum"

    def tiles(self) -> dict[Spans, list[list[int]]]:
        """The parts of the tensor, each with its summands, each summand with the ranks that have equal copies of it."""
        found: dict[Spans, dict[tuple[int, ...], list[int]]] = {}
        for lane, rank in enumerate(self.ranks):
            place = self.mesh.coordinate(lane)
            summand = tuple(place[axis] for axis in self.summed_axes)
            tile = spans_of(self.shape, self.mesh, self.placements, lane)
            found.setdefault(tile, {}).setdefault(summand, []).append(rank)
        return {tile: list(summands.values()) for tile, summands in sorted(found.items())}

    def to_plain(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "role": self.role,
            "type": self.type,
            "placements": dict(zip(self.mesh.names, map(str, self.placements), strict=True)),
            "factor": self.factor,
            "ranks": list(self.ranks),
        }
