"""Where tensors cross ranks, with the gradients that go back the other way."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = Any  # a ProcessGroup


def gathered(x: Tensor, group: Group) -> Tensor:
    whole = x.new_empty(x.size(0) * dist.get_world_size(group), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


def scattered_sum(x: Tensor, group: Group) -> Tensor:
    part = x.new_empty(x.size(0) // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_tensor(part, x.contiguous(), group=group)
    return part


def exchanged(x: Tensor, group: Group) -> Tensor:
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=group)
    return received


class Gather(torch.autograd.Function):
    """All parts of the first dim; what each rank makes of them goes back as a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return scattered_sum(grad, ctx.group), None


class ScatterSum(torch.autograd.Function):
    """A part of the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return scattered_sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.group), None


class Exchange(torch.autograd.Function):
    """Equal parts of the first dim, one for each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return exchanged(grad, ctx.group), None


def _elsewhere(ids: Tensor, rows: int, group: Group) -> tuple[Tensor, Tensor]:
    """Which ids other ranks hold, and the row here of those that they do not."""
    start = dist.get_rank(group) * rows
    foreign = (ids < start) | (ids >= start + rows)
    return foreign, (ids - start).masked_fill(foreign, 0)


def own_rows(ids: Tensor, weight: Tensor, group: Group) -> Tensor:
    """Rows of a table of which each rank has a part; zeros for those of others."""
    foreign, rows = _elsewhere(ids, weight.size(0), group)
    return torch.nn.functional.embedding(rows, weight).masked_fill(foreign.unsqueeze(-1), 0.0)


class CrossEntropy(torch.autograd.Function):
    """Each rank has the logits of its part of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Group) -> Tensor:
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        logits = logits - largest.unsqueeze(-1)
        foreign, column = _elsewhere(target, logits.size(-1), group)
        chosen = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(foreign, 0.0)
        dist.all_reduce(chosen, group=group)
        total = logits.exp().sum(-1)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(logits.exp() / total.unsqueeze(-1), foreign, column)
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        softmax, foreign, column = ctx.saved_tensors
        own = (~foreign).to(softmax.dtype).unsqueeze(-1)
        return softmax.scatter_add(-1, column.unsqueeze(-1), -own) * grad.unsqueeze(-1), None, None
