"""ByteDance-Seed/VeOmni #184, #862: the norm of hybrid-sharded gradients is summed over the replicas, too.

Parameters are sharded within a group of ranks and replicated between groups. The squares of a shard belong into the sum
once: summed over all ranks they count once per replica.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

BATCH, HIDDEN, MAX_NORM, RATE = 8, 4, 0.05, 0.1
BUG_LINE = "dist.all_reduce(squares)"


def sequential(x, w):
    grad = torch.autograd.grad(torch.tanh(x @ w.requires_grad_()).pow(2).mean(), w)[0]
    return w.detach() - RATE * grad * (MAX_NORM / grad.norm()).clamp(max=1.0)


def sharded_gradient(x, w, mesh):
    """The whole weight is gathered, its gradient reduced to this rank's shard and averaged over all ranks."""
    whole = w.new_empty(HIDDEN, HIDDEN)
    dist.all_gather_into_tensor(whole, w, group=mesh.get_group("shard"))
    whole.requires_grad_()
    torch.tanh(x @ whole).pow(2).mean().backward()
    grad = torch.empty_like(w)
    dist.reduce_scatter_tensor(grad, whole.grad, group=mesh.get_group("shard"))
    dist.all_reduce(grad, group=mesh.get_group("replica"))
    return grad / mesh.size()


def clipped_step(w, grad, squares):
    return w - RATE * grad * (MAX_NORM / squares.sqrt()).clamp(max=1.0)


def hsdp_fixed(x, w, mesh):
    grad = sharded_gradient(x, w, mesh)
    squares = grad.pow(2).sum()
    dist.all_reduce(squares, group=mesh.get_group("shard"))
    return clipped_step(w, grad, squares)


def hsdp_buggy(x, w, mesh):
    grad = sharded_gradient(x, w, mesh)
    squares = grad.pow(2).sum()
    dist.all_reduce(squares)
    return clipped_step(w, grad, squares)


ARGS = {
    "mesh": {"replica": 2, "shard": 2},
    "inputs": {
        "x": gg.Input((BATCH, HIDDEN), {"replica": Shard(0), "shard": Shard(0)}),
        "w": gg.Input((HIDDEN, HIDDEN), {"shard": Shard(0)}),
    },
    "outputs": {"out": {"shard": Shard(0)}},
}


@gg.check
def fixed():
    return gg.verify(sequential, hsdp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, hsdp_buggy, **ARGS)
