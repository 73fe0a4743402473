"""NovaSky-AI/SkyRL #1886: a backward reduces a contiguous copy of the gradient and returns the gradient itself.

`contiguous()` of a contiguous tensor is that tensor, and the sum arrives. A transposed gradient is copied first: the copy is
summed over the ranks and dropped.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

SEQUENCE, BATCH, HIDDEN, WIDTH = 4, 2, 3, 6
BUG_LINE = "dist.all_reduce(grad.contiguous())"


class Copy(torch.autograd.Function):
    """Identity whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class CopyReducingACopy(Copy):
    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad.contiguous())
        return grad


def step(copy, x, w, dy):
    """x is [sequence, batch, hidden]; with the batch in front for the product, its gradient is a transposed tensor."""
    x.requires_grad_()
    F.linear(copy(x).transpose(0, 1), w).backward(dy)
    return {"x": x.grad}


def sequential(x, w, dy):
    return step(lambda x: x, x, w, dy)


def tp_fixed(x, w, dy):
    return step(Copy.apply, x, w, dy)


def tp_buggy(x, w, dy):
    return step(CopyReducingACopy.apply, x, w, dy)


ARGS = {
    "mesh": {"tp": 2},
    "inputs": {
        "x": gg.Input((SEQUENCE, BATCH, HIDDEN)),
        "w": gg.Input((WIDTH, HIDDEN), Shard(0)),
        "dy": gg.Input((BATCH, SEQUENCE, WIDTH), Shard(2)),
    },
    "outputs": {"x": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, **ARGS)
