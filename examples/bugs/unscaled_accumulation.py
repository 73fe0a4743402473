"""Published with GraphGuard (Entangle, ASPLOS '26): accumulated gradients are not divided by the number of microbatches.

A batch is cut into microbatches whose gradients add up. Each loss is a mean over its microbatch, so without dividing
by their number the gradient is as many times too large.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

MICROBATCHES = 4
BUG_LINE = "F.mse_loss(torch.tanh(part @ w), wanted).backward()"


def sequential(x, target, w):
    w.requires_grad_()
    F.mse_loss(torch.tanh(x @ w), target).backward()
    return w.grad


def averaged(grad):
    dist.all_reduce(grad)
    return grad / dist.get_world_size()


def dp_fixed(x, target, w):
    w.requires_grad_()
    for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        (F.mse_loss(torch.tanh(part @ w), wanted) / MICROBATCHES).backward()
    return averaged(w.grad)


def dp_buggy(x, target, w):
    w.requires_grad_()
    for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        F.mse_loss(torch.tanh(part @ w), wanted).backward()
    return averaged(w.grad)


ARGS = {
    "mesh": {"dp": 2},
    "inputs": {"x": gg.Input((16, 4), Shard(0)), "target": gg.Input((16, 3), Shard(0)), "w": gg.Input((4, 3))},
    "outputs": {"out": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, dp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, dp_buggy, **ARGS)
