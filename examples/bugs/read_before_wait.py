"""The gradients are reduced in the background, and used before the reduction is waited for."""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard


def step(x, w):
    w.requires_grad_()
    (gradient,) = torch.autograd.grad((x @ w).pow(2).sum(), w)
    return w.detach() - 0.1 * gradient


def dp_step(x, w):
    w.requires_grad_()
    (gradient,) = torch.autograd.grad((x @ w).pow(2).sum(), w)
    work = dist.all_reduce(gradient, async_op=True)
    updated = w.detach() - 0.1 * gradient
    work.wait()
    return updated


@gg.check(expect="refuted")
def read_before_wait():
    return gg.verify(step, dp_step, mesh={"dp": 4}, inputs={"x": gg.Input((8, 4), Shard(0)), "w": gg.Input((4, 4))})
