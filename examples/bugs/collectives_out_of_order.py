"""A common mistake: collectives in a different order on different ranks.

Rank 0 logs its loss before the gradients are reduced, the other ranks after. Nothing names a collective but its place in
the order, so the loss of one rank meets the gradient of another.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

BUG_LINE = "dist.all_reduce(loss)  # rank 0 begins with its loss"


def local_step(x, w):
    loss = (x @ w.requires_grad_()).pow(2).sum()
    (gradient,) = torch.autograd.grad(loss, w)
    return loss.detach().clone(), gradient


def sequential(x, w):
    loss, gradient = local_step(x, w)
    return {"loss": loss, "gradient": gradient}


def dp_fixed(x, w):
    loss, gradient = local_step(x, w)
    dist.all_reduce(loss)
    dist.all_reduce(gradient)
    return {"loss": loss, "gradient": gradient}


def dp_buggy(x, w):
    loss, gradient = local_step(x, w)
    if dist.get_rank() == 0:
        dist.all_reduce(loss)  # rank 0 begins with its loss
    dist.all_reduce(gradient)
    if dist.get_rank() != 0:
        dist.all_reduce(loss)
    return {"loss": loss, "gradient": gradient}


ARGS = {"mesh": {"dp": 4}, "inputs": {"x": gg.Input((8, 4), Shard(0)), "w": gg.Input((4, 4))}}


@gg.check
def fixed():
    return gg.verify(sequential, dp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, dp_buggy, **ARGS)
