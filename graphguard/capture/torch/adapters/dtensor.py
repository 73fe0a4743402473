"""torch's DTensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _collective_utils
from torch.distributed.tensor._ops._math_ops import _NormPartial

from graphguard.capture.torch.adapters.holders import Holders


def distribute_without_data(holders: Holders) -> None:
    """DTensor does not send tensors that have no data: its two functions again, without the question."""

    def mesh_scatter(
        output: torch.Tensor, scatter_list: Any, mesh: DeviceMesh, mesh_dim: int = 0, async_op: bool = False, *,
        group_src: int = 0,
    ) -> Any:  # fmt: skip
        group = mesh.get_group(mesh_dim)
        pieces = scatter_list if dist.get_rank(group) == group_src else None
        return dist.scatter(output, pieces, group=group, async_op=async_op, group_src=group_src)

    def mesh_broadcast(
        tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int = 0, async_op: bool = False, *, group_src: int = 0
    ) -> Any:
        return dist.broadcast(tensor, group=mesh.get_group(mesh_dim), async_op=async_op, group_src=group_src)

    holders.replace(_collective_utils.mesh_scatter, mesh_scatter)
    holders.replace(_collective_utils.mesh_broadcast, mesh_broadcast)


def take_roots_of_sizes() -> None:
    """A whole tensor becomes a part of a norm when it is divided by a root of the number of ranks. As a float that root is
    rounded, so that its square is not the number: take it where numbers are not rounded, in the graph."""

    def part_of_norm(self: _NormPartial, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
        size = torch.tensor(float(mesh.size(mesh_dim)), dtype=tensor.dtype)
        return tensor / size ** (1.0 / self.norm_type)

    _NormPartial._partition_value = part_of_norm
