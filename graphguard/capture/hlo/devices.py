"""Which devices: shardings, and the groups of collectives in all ways to write them."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from graphguard.capture.hlo.text import braced
from graphguard.errors import CaptureError

Groups = tuple[tuple[int, ...], ...]
_TILED = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))")
_ON_MESH = re.compile(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}")


def _numbers(text: str | None) -> list[int] | None:
    return [int(each) for each in text.split(",") if each] if text else None


def tiled(text: str) -> np.ndarray[Any, Any]:
    """`[2,1,4]<=[2,4]T(1,0)`, or `[2,1]0,1`."""
    found = _TILED.match(text)
    if found is None:
        raise CaptureError(f"the devices {text[:60]!r} are written in a way that is not known")
    tile, dims, order, listed = map(_numbers, found.groups())
    assert tile is not None
    if listed is not None:
        return np.array(listed).reshape(tile)
    if dims is None:
        raise CaptureError(f"the devices {text[:60]!r} are written in a way that is not known")
    ids = np.arange(math.prod(dims)).reshape(dims)
    return (ids.transpose(order) if order else ids).reshape(tile)


def groups_of(attributes: str, count: int) -> Groups:
    """The three ways to write replica_groups; an empty one is all devices."""
    if "replica_groups={}" in attributes:
        return (tuple(range(count)),)
    if found := re.search(r"replica_groups=\{(\{.*?\})\}", attributes):
        return tuple(tuple(_numbers(each) or ()) for each in re.findall(r"\{([\d,]+)\}", found[1]))
    if found := re.search(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
        return tuple(tuple(row) for row in tiled(found[1]).tolist())
    if found := _ON_MESH.search(attributes):
        return _on_mesh(*found.groups())
    raise CaptureError("its replica_groups are written in a way that is not known")


def _on_mesh(axes: str, shape: str | None, order: str | None, chosen: str) -> Groups:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    names = re.findall(r"'([^']+)'", chosen)
    if not set(names) <= sizes.keys() or axes.count("=") != len(sizes):
        raise CaptureError("its replica_groups name an axis that their mesh does not have, or no size of one")
    ids = np.arange(math.prod(sizes.values()))
    if shape:
        ids = ids.reshape(_numbers(shape))
        ids = ids.transpose(_numbers(order)) if order else ids
    ids = ids.reshape(list(sizes.values()))
    own = [list(sizes).index(name) for name in names]
    others = [dim for dim in range(len(sizes)) if dim not in own]
    rows = ids.transpose([*others, *own]).reshape(-1, math.prod(sizes[name] for name in names))
    return tuple(tuple(row) for row in rows.tolist())


def pairs_of(attributes: str) -> list[tuple[int, int]]:
    """Who sends to whom."""
    found = re.search(r"source_target_pairs=\{(.*?)\}\}", attributes)
    if found is None:
        return []
    return [(int(one), int(other)) for one, other in re.findall(r"\{(\d+),(\d+)", found[1] + "}")]


# ---------------------------------------------------------------------- shardings
def parts_of(sharding: str | None, rank: int) -> list[tuple[int, int]]:
    """By dim, which of how many parts a device has; nothing where it has all."""
    if sharding is None or sharding.startswith("{replicated"):
        return []
    if sharding.startswith("{maximal"):
        raise CaptureError(f"the sharding {sharding} has an array on one device, which is not modelled")
    found = re.search(r"devices=(\S+?)[\s}]", sharding + " ")
    if found is None or "last_tile_dims" in sharding or "manual" in sharding or "unreduced" in sharding:
        raise CaptureError(f"the sharding {sharding} is not modelled")
    tile = tiled(found[1])
    place = [int(axis[0]) for axis in np.nonzero(tile == rank)]
    parts = list(zip(place, tile.shape, strict=True))
    return parts[:-1] if "last_tile_dim_replicate" in sharding else parts


def shardings_of(sharding: str | None, count: int) -> list[str | None]:
    """One for each of several arrays."""
    if sharding is None:
        return [None] * count
    if not sharding.startswith("{{"):
        return [sharding] * count
    inner, found, place = sharding[1:-1], [], 0
    while (place := inner.find("{", place)) >= 0:
        found.append(braced(inner, place))
        place += len(found[-1])
    if len(found) != count:
        raise CaptureError(f"{len(found)} shardings are given for {count} arrays")
    return list(found)
