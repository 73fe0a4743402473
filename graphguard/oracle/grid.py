"""The ranks that return an output, as a grid, and what placements on it make of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce as fold

import torch

from graphguard.graph.ir import Mesh
from graphguard.graph.placement import Partial, Placements, Spans, candidates, spans_of

REDUCTIONS: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    "sum": lambda tensors: fold(torch.add, tensors),
    "avg": lambda tensors: _total(tensors) / len(tensors),
    "max": lambda tensors: fold(torch.maximum, tensors),
    "min": lambda tensors: fold(torch.minimum, tensors),
}


@dataclass(frozen=True)
class Grid:
    """Some positions of each axis of a mesh. `ranks` are row-major; a lane is a place among them."""

    mesh: Mesh
    ranks: tuple[int, ...]

    def lanes_along(self, axis: int, lane: int) -> list[int]:
        """The lanes that differ from one in an axis alone, itself among them."""
        inner = math.prod(self.mesh.shape[axis + 1 :])
        size = self.mesh.shape[axis]
        first = lane - (lane // inner % size) * inner
        return [first + place * inner for place in range(size)]

    def lanes_over(self, axes: Sequence[int], lane: int) -> tuple[int, ...]:
        """The lanes that differ from one in some axes alone, itself among them."""
        found = {lane}
        for axis in axes:
            found = {other for each in found for other in self.lanes_along(axis, each)}
        return tuple(sorted(found))

    def spans(self, shape: Sequence[int], placements: Placements, lane: int) -> Spans:
        """The tile of a lane."""
        return spans_of(shape, self.mesh, placements, lane)

    def candidates(self, shape: Sequence[int], sums: bool = True) -> list[Placements]:
        """All placements, those without sums first."""
        return candidates(len(shape), self.mesh, sums)

    def count(self, shape: Sequence[int]) -> int:
        """How many candidates there are."""
        return math.prod(len(shape) + 2 for size in self.mesh.shape if size > 1)

    def reduced(self, tensors: list[torch.Tensor], placements: Placements) -> list[torch.Tensor] | None:
        """By lane, the ranks' tensors reduced over the axes that are Partial; None if their shapes do not agree."""
        for axis, placement in enumerate(placements):
            if isinstance(placement, Partial):
                groups = [[tensors[other] for other in self.lanes_along(axis, lane)] for lane in range(len(tensors))]
                if any(len({tensor.shape for tensor in group}) > 1 for group in groups):
                    return None
                tensors = [REDUCTIONS[placement.reduce](group) for group in groups]
        return tensors


def _total(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Of narrow whole numbers, too, which would wrap."""
    real = tensors[0].is_floating_point() or tensors[0].is_complex()
    return fold(torch.add, tensors if real else [tensor.to(torch.float64) for tensor in tensors])


def grid_of(mesh: Mesh, ranks: Sequence[int]) -> Grid | None:
    """The grid that some ranks of a mesh form, if they do."""
    grid = mesh.sub_grid(ranks)
    return None if grid is None else Grid(grid, tuple(sorted(ranks)))


def cut(tensor: torch.Tensor, spans: Spans) -> torch.Tensor:
    return tensor[tuple(slice(low, high) for low, high in spans)]
