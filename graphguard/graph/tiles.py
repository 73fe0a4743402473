"""The tiles that all ranks of a mesh hold by placements, as one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from graphguard.graph.ir import Mesh
from graphguard.graph.placement import Placements, Shard

Tiles: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


def tiles_of(shape: Sequence[int], mesh: Mesh, placements: Placements) -> Tiles:
    """The tiles of all lanes of the mesh: an array [lanes, dims, 2]."""
    tiles = np.zeros((mesh.size, len(shape), 2), dtype=np.int64)
    tiles[:, :, 1] = shape
    coordinates = np.unravel_index(np.arange(mesh.size), mesh.shape)
    for coordinate, (_, count), placement in zip(coordinates, mesh.axes, placements, strict=True):
        if isinstance(placement, Shard):
            low, high = tiles[:, placement.dim, 0].copy(), tiles[:, placement.dim, 1].copy()
            step = -((low - high) // count)
            start = np.minimum(coordinate * step, high - low)
            tiles[:, placement.dim, 0], tiles[:, placement.dim, 1] = low + start, low + np.minimum(start + step, high - low)
    return tiles
