"""TrainVerify (SOSP '25): an exponent differs on all ranks.

The norm of a hidden dim that is split over the ranks raises the mean square to the power of -1/2. The distributed version
takes the power of -1, as if the root had been taken already.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

TOKENS, HIDDEN, EPS = 3, 4, 1e-5
BUG_LINE = "scale = (squares / HIDDEN + EPS).pow(-1)"


def sequential(x, gamma, dy):
    x.requires_grad_(), gamma.requires_grad_()
    (x * (x.pow(2).mean(-1, keepdim=True) + EPS).pow(-0.5) * gamma).backward(dy)
    return {"x": x.grad, "gamma": gamma.grad}


class Sum(torch.autograd.Function):
    """Over the ranks; each rank's result is used for its own part, so the gradients are summed as well."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def tp_fixed(x, gamma, dy):
    x.requires_grad_(), gamma.requires_grad_()
    squares = Sum.apply(x.pow(2).sum(-1, keepdim=True))
    scale = (squares / HIDDEN + EPS).pow(-0.5)
    (x * scale * gamma).backward(dy)
    return {"x": x.grad, "gamma": gamma.grad}


def tp_buggy(x, gamma, dy):
    x.requires_grad_(), gamma.requires_grad_()
    squares = Sum.apply(x.pow(2).sum(-1, keepdim=True))
    scale = (squares / HIDDEN + EPS).pow(-1)
    (x * scale * gamma).backward(dy)
    return {"x": x.grad, "gamma": gamma.grad}


PART = gg.Input((TOKENS, HIDDEN), Shard(1))
ARGS = {"mesh": {"tp": 2}, "inputs": {"x": PART, "gamma": gg.Input((HIDDEN,), Shard(0)), "dy": PART}}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, **ARGS)
