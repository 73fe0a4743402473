"""huggingface/transformers #39659: the last, incomplete window of gradient accumulation is divided by the nominal size.

Losses are divided by the number of microbatches in a window. When an epoch ends with fewer, the last update is too small.

Also: Lightning-AI/pytorch-lightning #19987.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

WINDOW, LEFT = 4, 3  # microbatches of a full window, and those that are left at the end of the epoch
BUG_LINE = "loss = F.mse_loss(torch.tanh(part @ w), wanted) / WINDOW"


def sequential(x, target, w):
    F.mse_loss(torch.tanh(x @ w.requires_grad_()), target).backward()
    return {"w": w.grad}


def averaged(grad):
    dist.all_reduce(grad)
    return grad / dist.get_world_size()


def ga_fixed(x, target, w):
    w.requires_grad_()
    for part, wanted in zip(x.chunk(LEFT), target.chunk(LEFT), strict=True):
        loss = F.mse_loss(torch.tanh(part @ w), wanted) / LEFT
        loss.backward()
    return {"w": averaged(w.grad)}


def ga_buggy(x, target, w):
    w.requires_grad_()
    for part, wanted in zip(x.chunk(LEFT), target.chunk(LEFT), strict=True):
        loss = F.mse_loss(torch.tanh(part @ w), wanted) / WINDOW
        loss.backward()
    return {"w": averaged(w.grad)}


ARGS = {
    "mesh": {"dp": 2},
    "inputs": {"x": gg.Input((12, 4), Shard(0)), "target": gg.Input((12, 3), Shard(0)), "w": gg.Input((4, 3))},
    "outputs": {"w": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, ga_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, ga_buggy, **ARGS)
