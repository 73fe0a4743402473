"""Outputs whose slices along one dim are all there, in an order that no tile explains: a zigzag layout, or a wrong one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphguard.oracle.clean import Observed
from graphguard.oracle.reference import Reference

_MOST_COMPARED = 4_000_000  # elements
_SHOWN = 4  # ranks in a text


def reordered(path: str, ranks: Sequence[int], samples: Sequence[Observed]) -> str | None:
    """Which slices of an output each rank holds, in words, if along one dim the ranks have all of them."""
    for dim in range(samples[0].reference.whole.dim()):
        found = [_slices(sample, dim) for sample in samples]
        if found[0] is not None and all(each == found[0] for each in found):
            told = [f"rank {rank} holds {_runs(places)}" for rank, places in zip(ranks, found[0], strict=True)]
            shown = told if len(told) <= _SHOWN else [*told[: _SHOWN - 1], f"and so on for {len(told) - _SHOWN + 1} more"]
            return f"{path}: all of dim {dim} is there, in another order: {', '.join(shown)}"
    return None


def _slices(sample: Observed, dim: int) -> list[list[int]] | None:
    """By rank, the places along a dim of the output that its slices come from; None if one comes from nowhere."""
    reference = sample.reference.at(lambda tensor: tensor.movedim(dim, 0).flatten(1) if tensor.dim() > 1 else tensor[:, None])
    whole = sample.reference.whole
    rest = [size for other, size in enumerate(whole.shape) if other != dim]
    places: list[list[int]] = []
    for tensor in sample.tensors:
        if tensor.dim() != whole.dim() or [size for other, size in enumerate(tensor.shape) if other != dim] != rest:
            return None
        if tensor.shape[dim] * whole.numel() > _MOST_COMPARED or not tensor.numel():
            return None
        rows = [_place(reference, row) for row in tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)]
        if None in rows:
            return None
        places.append([row for row in rows if row is not None])
    return places if {row for rows in places for row in rows} == set(range(whole.shape[dim])) else None


def _place(reference: Reference, row: torch.Tensor) -> int | None:
    same = (reference.excess(row.expand(reference.whole.shape)) <= 1).all(1).nonzero()
    return int(same[0]) if len(same) == 1 else None  # rows that are alike tell nothing


def _runs(places: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for place in places:
        if runs and runs[-1][-1] + 1 == place:
            runs[-1].append(place)
        else:
            runs.append([place])
    return " and ".join(f"{run[0]}:{run[-1] + 1}" for run in runs[:_SHOWN]) + (" and more" if len(runs) > _SHOWN else "")
