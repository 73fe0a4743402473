"""A common mistake: gradients that are reduced in the background are used before the reduction is waited for."""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

BUG_LINE = "updated = w.detach() - 0.1 * gradient  # the reduction may still run"


def local_gradient(x, w):
    return torch.autograd.grad((x @ w.requires_grad_()).pow(2).sum(), w)[0]


def sequential(x, w):
    return w.detach() - 0.1 * local_gradient(x, w)


def dp_fixed(x, w):
    gradient = local_gradient(x, w)
    work = dist.all_reduce(gradient, async_op=True)
    work.wait()
    return w.detach() - 0.1 * gradient


def dp_buggy(x, w):
    gradient = local_gradient(x, w)
    work = dist.all_reduce(gradient, async_op=True)
    updated = w.detach() - 0.1 * gradient  # the reduction may still run
    work.wait()
    return updated


ARGS = {"mesh": {"dp": 4}, "inputs": {"x": gg.Input((8, 4), Shard(0)), "w": gg.Input((4, 4))}}


@gg.check
def fixed():
    return gg.verify(sequential, dp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, dp_buggy, **ARGS)
