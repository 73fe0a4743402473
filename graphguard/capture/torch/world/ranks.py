"""Makes this process one rank of a world that does not exist: torch's fake process group, and no memory of other ranks."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from graphguard.graph.ir import Mesh

# Where torch keeps its groups, beside the world itself.
_TABLES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")
_inherited: list[object] = []


def leave_any_group() -> None:
    """torch.distributed as if never initialised. The groups themselves are the parent's: they are kept, as their end would be
    felt by other processes, but out of sight. Their names stay taken, so that the count of groups goes on."""
    if dist.is_initialized():
        _inherited.extend([c10d._world, *(getattr(c10d, table) for table in _TABLES)])
        for table in _TABLES:
            setattr(c10d, table, {})
        c10d._world = c10d._World()
        c10d.GroupMember.WORLD = None


def become_rank(rank: int, mesh: Mesh) -> DeviceMesh:
    """Initialise torch.distributed as the given rank, and lay out its mesh."""
    become_rank_of_world(rank, mesh)
    return init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)


def become_rank_of_world(rank: int, mesh: Mesh) -> None:
    leave_any_group()
    forget_other_ranks()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(mesh.size), LOCAL_WORLD_SIZE=str(mesh.size))
    dist.init_process_group("cpu:fake,cuda:fake,meta:fake", rank=rank, world_size=mesh.size, store=FakeStore())


def forget_other_ranks() -> None:
    """Empty DTensor's caches. Two meshes of one layout are equal to them whatever the rank, so that entries made for one
    rank would be served to another: the loss comes out right and the gradients wrong."""
    from torch.distributed.tensor import DTensor, _collective_utils, _redistribute
    from torch.distributed.tensor._ops import single_dim_strategy

    for owner in (DTensor._op_dispatcher.sharding_propagator, _redistribute, single_dim_strategy, _collective_utils):
        for name in dir(owner):
            clear = getattr(getattr(owner, name, None), "cache_clear", None)
            if clear is not None:
                clear()
    _redistribute.clear_redistribute_planner_cache()
    clearers: list[Any] = [
        getattr(torch._C, name) for name in dir(torch._C) if "dtensor" in name.lower() and "clear" in name.lower()
    ]
    for clear in clearers:
        clear()
