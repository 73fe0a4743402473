"""huggingface/nanotron #172, #46: a row-parallel backward multiplies by the weight before it gathers.

The output is split by tokens, so its gradient is, too. The backward must gather it and then multiply. The asynchronous
path multiplied first and gathered the result: tokens of other ranks meet the wrong shard of the weight. The forward is
exact.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

TOKENS, WIDTH, HIDDEN = 4, 6, 5
BUG_LINE = "grad_x = gather(grad @ w.T)"


def gather(x):
    out = x.new_empty(x.size(0) * dist.get_world_size(), x.size(1))
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


class RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        y = x @ w
        out = y.new_empty(y.size(0) // dist.get_world_size(), y.size(1))
        dist.reduce_scatter_tensor(out, y)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad = gather(grad)
        return grad @ w.T, x.T @ grad


class AsyncRowLinear(RowLinear):
    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad_x = gather(grad @ w.T)
        return grad_x, x.T @ gather(grad)


def step(linear, x, w, dy):
    x.requires_grad_(), w.requires_grad_()
    y = linear(x, w)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad, "w": w.grad}


def sequential(x, w, dy):
    return step(torch.matmul, x, w, dy)


def tp_fixed(x, w, dy):
    return step(RowLinear.apply, x, w, dy)


def tp_buggy(x, w, dy):
    return step(AsyncRowLinear.apply, x, w, dy)


ARGS = {
    "mesh": {"tp": 2},
    "inputs": {
        "x": gg.Input((TOKENS, WIDTH), Shard(1)),
        "w": gg.Input((WIDTH, HIDDEN), Shard(0)),
        "dy": gg.Input((TOKENS, HIDDEN), Shard(0)),
    },
}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, **ARGS)
