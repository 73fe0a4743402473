"""Rank 0 logs its loss before the gradients are reduced, the other ranks after: the sums are exchanged."""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard


def step(x, w):
    w.requires_grad_()
    loss = (x @ w).pow(2).sum()
    (gradient,) = torch.autograd.grad(loss, w)
    return {"loss": loss.detach(), "gradient": gradient}


def dp_step(x, w):
    w.requires_grad_()
    loss = (x @ w).pow(2).sum()
    (gradient,) = torch.autograd.grad(loss, w)
    total = loss.detach().clone()
    if dist.get_rank() == 0:
        dist.all_reduce(total)
    dist.all_reduce(gradient)
    if dist.get_rank() != 0:
        dist.all_reduce(total)
    return {"loss": total, "gradient": gradient}


@gg.check(expect="refuted")
def collectives_out_of_order():
    return gg.verify(step, dp_step, mesh={"dp": 4}, inputs={"x": gg.Input((8, 4), Shard(0)), "w": gg.Input((4, 4))})
