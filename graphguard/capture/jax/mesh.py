"""Which ranks communicate: those along some axes of the mesh, parts of them, or groups that are listed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from graphguard.errors import CaptureError
from graphguard.graph.ir import Mesh
from graphguard.graph.rank_class import Numbers

Ranks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Along:
    """The ranks along axes, in the order of these axes. parts: places along them, where only these communicate with each other.
    listed: all groups, in place of axes."""

    axes: tuple[str, ...] = ()
    parts: Ranks | None = None
    listed: Ranks | None = None


class Places:
    """Where ranks stand on a mesh."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._ranks = np.arange(mesh.size).reshape(mesh.shape)

    def groups(self, along: Along) -> Numbers:
        """The members of all groups, a row each."""
        if along.listed is not None:
            return self._covering(along.listed)
        own = [self._axis(axis) for axis in along.axes]
        others = [axis for axis in range(self._ranks.ndim) if axis not in own]
        size = int(np.prod([self.mesh.shape[axis] for axis in own], dtype=np.int64))
        rows = self._ranks.transpose([*others, *own]).reshape(-1, size)
        if along.parts is None:
            return rows
        if sorted(place for part in along.parts for place in part) != list(range(size)):
            raise CaptureError(f"axis_index_groups={list(along.parts)} does not name each of the {size} places once")
        return np.concatenate([rows[:, list(part)] for part in self._even(along.parts)])

    def size(self, along: Along) -> int:
        return int(self.groups(along).shape[1])

    def coordinate(self, axis: str) -> Numbers:
        """By rank, its place along an axis."""
        shape = [1] * self._ranks.ndim
        at = self._axis(axis)
        shape[at] = self.mesh.shape[at]
        return np.broadcast_to(np.arange(self.mesh.shape[at]).reshape(shape), self.mesh.shape).reshape(-1)

    def _axis(self, axis: str) -> int:
        if axis not in self.mesh.names:
            raise CaptureError(f"the axis {axis!r} is not one of the mesh {self.mesh}")
        return self.mesh.names.index(axis)

    def _covering(self, groups: Ranks) -> Numbers:
        if sorted(rank for group in groups for rank in group) != list(range(self.mesh.size)):
            raise CaptureError(
                f"the groups {[list(group) for group in groups]} do not name each of the {self.mesh.size} ranks once"
            )
        return np.array(self._even(groups), dtype=np.int64)

    def _even(self, groups: Ranks) -> Ranks:
        if len({len(group) for group in groups}) > 1:
            raise CaptureError(f"the groups {[list(group) for group in groups]} are not of one size")
        return groups


def axes_of(names: Any) -> tuple[str, ...]:
    """As JAX has them: a name, or several; None for none."""
    if names is None:
        return ()
    found = tuple(names) if isinstance(names, (tuple, list)) else (names,)
    for name in found:
        if not isinstance(name, str):
            raise CaptureError(f"the axis {name!r} has no name")
    return found
