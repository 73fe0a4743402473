"""pytorch/pytorch #165962: the norm of a gradient is taken before the gradient is complete.

Each rank has the gradient of its own examples. A norm is not linear: the norms of the parts do not add up to the norm
of the sum. (DTensor took norm, max and min of a Partial tensor that way.)
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

BUG_LINE = "norm = grad.norm()"


def gradient(x, w):
    w.requires_grad_()
    torch.tanh(x @ w).sum().backward()
    return w.grad


def sequential(x, w):
    return gradient(x, w).norm()


def dp_fixed(x, w):
    grad = gradient(x, w)
    dist.all_reduce(grad)
    return torch.linalg.vector_norm(grad)


def dp_buggy(x, w):
    grad = gradient(x, w)
    norm = grad.norm()
    dist.all_reduce(norm)
    return norm


ARGS = {"mesh": {"dp": 2}, "inputs": {"x": gg.Input((6, 4), Shard(0)), "w": gg.Input((4, 3))}}


@gg.check
def fixed():
    return gg.verify(sequential, dp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, dp_buggy, **ARGS)
