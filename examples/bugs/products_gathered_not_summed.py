"""TrainVerify (SOSP '25): an all_gather stands where an all_reduce is due.

The partial products of a row-parallel matrix are put one below the other instead of being summed. The loss is a mean over
all rows, however many there are.
"""

import torch
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

TOKENS, HIDDEN, WIDTH = 4, 3, 6
BUG_LINE = "y = torch.cat(dist_nn.all_gather(F.silu(x @ up) @ down))"


def step(y, x, up, down):
    loss = F.softplus(y).sum(-1).mean()
    loss.backward()
    return {"loss": loss.detach(), "up": up.grad, "down": down.grad}


def sequential(x, up, down):
    up.requires_grad_(), down.requires_grad_()
    return step(F.silu(x @ up) @ down, x, up, down)


class Sum(torch.autograd.Function):
    """The result is whole on every rank, and so is its gradient."""

    @staticmethod
    def forward(ctx, x):
        return dist_nn.all_reduce(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def tp_fixed(x, up, down):
    up.requires_grad_(), down.requires_grad_()
    y = Sum.apply(F.silu(x @ up) @ down)
    return step(y, x, up, down)


def tp_buggy(x, up, down):
    up.requires_grad_(), down.requires_grad_()
    y = torch.cat(dist_nn.all_gather(F.silu(x @ up) @ down))
    return step(y, x, up, down)


INPUTS = {
    "x": gg.Input((TOKENS, HIDDEN)),
    "up": gg.Input((HIDDEN, WIDTH), Shard(1)),
    "down": gg.Input((WIDTH, HIDDEN), Shard(0)),
}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, mesh={"tp": 2}, inputs=INPUTS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, mesh={"tp": 2}, inputs=INPUTS)
