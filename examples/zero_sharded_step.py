"""ZeRO by hand: each data-parallel rank keeps and updates its own rows of the parameter, with an optimizer of its own.

The parameter is gathered for the forward, and its gradient is reduced and scattered; two steps of Adam, as the second
one reads the moments that the first one left behind.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

BATCH, HIDDEN, WIDTH = 8, 4, 6


def gradient(x, target, w):
    w = w.detach().requires_grad_()
    F.mse_loss(torch.tanh(x @ w), target).backward()
    return w.grad


def train(x, target, w):
    optimizer = torch.optim.Adam([w.requires_grad_()], lr=0.01)
    for _ in range(2):
        w.grad = gradient(x, target, w)
        optimizer.step()
    return w.detach()


def zero_train(x, target, w):
    world = dist.get_world_size()
    optimizer = torch.optim.Adam([w.requires_grad_()], lr=0.01)
    for _ in range(2):
        whole = w.new_empty(w.size(0) * world, w.size(1))
        dist.all_gather_into_tensor(whole, w.detach())
        w.grad = torch.empty_like(w)
        dist.reduce_scatter_tensor(w.grad, gradient(x, target, whole))
        w.grad /= world
        optimizer.step()
    return w.detach()


@gg.check
def sharded_adam():
    return gg.verify(
        train,
        zero_train,
        mesh={"dp": 2},
        inputs={
            "x": gg.Input((BATCH, HIDDEN), Shard(0)),
            "target": gg.Input((BATCH, WIDTH), Shard(0)),
            "w": gg.Input((HIDDEN, WIDTH), Shard(0)),
        },
    )
