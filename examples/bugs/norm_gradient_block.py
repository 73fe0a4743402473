"""Published with GraphGuard (Entangle, ASPLOS '26): the gradient of a LayerNorm's weight is not summed.

The norm runs on each rank's own tokens, the matrix behind it is column-parallel. Gathering the tokens in between has
the right backward, yet the gradient of the replicated weight of the norm still covers one rank's tokens only.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, WIDTH = 8, 6, 8
BUG_LINE = "h = GatherTokens.apply(F.layer_norm(x, (HIDDEN,), gamma))"


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = x.new_empty(x.size(0) * dist.get_world_size(), x.size(1))
        dist.all_gather_into_tensor(out, x)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(grad.size(0) // dist.get_world_size(), grad.size(1))
        dist.reduce_scatter_tensor(out, grad)
        return out


def sequential(x, dy, gamma, a):
    gamma, a = gamma.requires_grad_(), a.requires_grad_()
    y = F.layer_norm(x, (HIDDEN,), gamma) @ a
    y.backward(dy)
    return {"gamma": gamma.grad, "a": a.grad}


def tp_backward(x, dy, gamma, a):
    gamma, a = gamma.requires_grad_(), a.requires_grad_()
    h = GatherTokens.apply(F.layer_norm(x, (HIDDEN,), gamma))
    (h @ a).backward(dy)
    return {"gamma": gamma.grad, "a": a.grad}


def sp_fixed(x, dy, gamma, a):
    grads = tp_backward(x, dy, gamma, a)
    dist.all_reduce(grads["gamma"])
    return grads


def sp_buggy(x, dy, gamma, a):
    return tp_backward(x, dy, gamma, a)


ARGS = {
    "mesh": {"tp": 2},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN), Shard(0)),
        "dy": gg.Input((TOKENS, WIDTH), Shard(1)),
        "gamma": gg.Input((HIDDEN,)),
        "a": gg.Input((HIDDEN, WIDTH), Shard(1)),
    },
    "outputs": {"gamma": Replicate(), "a": Shard(1)},
}


@gg.check
def fixed():
    return gg.verify(sequential, sp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, sp_buggy, **ARGS)
