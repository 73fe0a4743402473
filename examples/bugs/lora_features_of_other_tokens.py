"""NVIDIA-NeMo/Megatron-Bridge #5900: LoRA factors are split over ranks that hold different tokens.

The base layer is duplicated under sequence parallelism: each rank has all of its weight and a part of the tokens. The
adapter was split all the same, and the gather joins features of one rank's tokens with features of another rank's.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, WIDTH, RANK = 6, 4, 5, 4
BUG_LINE = "low = GatherFeatures.apply(x @ a)"


class GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()].contiguous()


def sequential(x, dy, base, a, b):
    a.requires_grad_(), b.requires_grad_()
    y = x @ base + (x @ a) @ b
    y.backward(dy)
    return {"y": y.detach(), "a": a.grad, "b": b.grad}


def sp_fixed(x, dy, base, a, b):
    a.requires_grad_(), b.requires_grad_()
    y = x @ base + (x @ a) @ b
    y.backward(dy)
    dist.all_reduce(a.grad)
    dist.all_reduce(b.grad)
    return {"y": y.detach(), "a": a.grad, "b": b.grad}


def sp_buggy(x, dy, base, a, b):
    a.requires_grad_(), b.requires_grad_()
    low = GatherFeatures.apply(x @ a)
    y = x @ base + low @ b
    y.backward(dy)
    dist.all_reduce(b.grad)
    return {"y": y.detach(), "a": a.grad, "b": b.grad}


def arguments(placement):
    return {
        "mesh": {"tp": 2},
        "inputs": {
            "x": gg.Input((TOKENS, HIDDEN), Shard(0)),
            "dy": gg.Input((TOKENS, WIDTH), Shard(0)),
            "base": gg.Input((HIDDEN, WIDTH)),
            "a": gg.Input((HIDDEN, RANK), placement),
            "b": gg.Input((RANK, WIDTH)),
        },
        "outputs": {"y": Shard(0), "a": placement, "b": Replicate()},
    }


@gg.check
def fixed():
    return gg.verify(sequential, sp_fixed, **arguments(Replicate()))


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, sp_buggy, **arguments(Shard(1)))
