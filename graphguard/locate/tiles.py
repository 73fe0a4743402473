"""Tensors of the ranks that were moved wrongly, or are wrong constants: with a tile of a sequential tensor in their place all
outputs are right."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from graphguard.graph.ir import Value
from graphguard.graph.placement import Placements
from graphguard.locate.first_wrong import Suspects
from graphguard.locate.made_of import Probe
from graphguard.locate.rerun import Change, Edit
from graphguard.oracle.grid import Grid, cut

_MOST_PLACEMENTS, _MOST_OWNERS = 8, 4


class Retile:
    """Edits that put tiles of sequential tensors in place of what the ranks have."""

    def __init__(self, suspects: Suspects):
        self.suspects = suspects
        self.grid = Grid(suspects.mesh, tuple(range(suspects.mesh.size)))
        self.tensors = suspects.trial.sequential.values

    def edits(self, turns: list[dict[int, Value]]) -> Iterator[Edit]:
        """By which sequential tensor, cut how, the tensors of a site may be replaced."""
        if len(turns) != 1 or len(turns[0]) != self.suspects.mesh.size:
            return
        turn = turns[0]
        shapes = [turn[rank].shape for rank in range(len(turn))]
        for whole in self._wholes(turn):
            for placements in self._placements(whole, shapes):
                parts = [cut(whole, self.grid.spans(whole.shape, placements, rank)) for rank in range(len(turn))]
                held = [self.suspects.trial.ranks[rank].values[value] for rank, value in turn.items()]
                if any(
                    part.shape != value.shape or not torch.equal(part, value) for part, value in zip(parts, held, strict=True)
                ):
                    yield {(rank, turn[rank]): _is(part) for rank, part in enumerate(parts)}

    def _wholes(self, turn: dict[int, Value]) -> list[torch.Tensor]:
        """Sequential tensors with the same elements; of numbers that say nothing, all of the same kind."""
        at = (0, turn[0])
        held = self.suspects.trial.ranks[0].values.get(turn[0])
        if held is None:
            return []
        if Probe.of(held).numbers.size:
            origin = self.suspects.origin(at) if at in self.suspects.makers else None
            if origin is None or origin.owner is None or origin.summed:
                return []
            owners = self.suspects.known.owner_of
            found = [t for v, t in self.tensors.items() if owners.get(v) == origin.owner]
        else:
            found = [t for t in self.tensors.values() if t.dtype == held.dtype and not Probe.of(t).numbers.size]
        alike = [t for t in found if t.dim() == held.dim() and t.numel() > 1 and t.dtype == held.dtype]
        distinct: list[torch.Tensor] = []
        for tensor in alike:
            if not any(tensor.shape == other.shape and torch.equal(tensor, other) for other in distinct):
                distinct.append(tensor)
        return distinct[:_MOST_OWNERS]

    def _placements(self, whole: torch.Tensor, shapes: list[tuple[int, ...]]) -> list[Placements]:
        """Those that give the shapes first: what reads a tensor may take one of another shape, too."""
        chosen = self.grid.candidates(whole.shape, sums=False)[:_MOST_PLACEMENTS]
        return sorted(chosen, key=lambda placements: not self._gives(whole, placements, shapes))

    def _gives(self, whole: torch.Tensor, placements: Placements, shapes: list[tuple[int, ...]]) -> bool:
        spans = (self.grid.spans(whole.shape, placements, rank) for rank in range(len(shapes)))
        return all(shape == tuple(high - low for low, high in each) for shape, each in zip(shapes, spans, strict=True))


def _is(part: torch.Tensor) -> Change:
    return Change((), lambda get: part)
