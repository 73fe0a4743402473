"""KevinMusgrave/pytorch-metric-learning #363, JohnGiorgi/DeCLUTR #212: all_gather cuts the gradient of a contrastive loss.

Every rank gathers the embeddings of all ranks and computes the whole loss. `dist.all_gather` has no backward, so each
rank puts its own embeddings back into the list; their gradient is that of one of N equal losses, and the mean of
data parallelism then leaves 1/N of it.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

BUG_LINE = "contrastive(torch.cat([*parts[:rank], z, *parts[rank + 1 :]])).backward()"


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        out = z.new_empty(z.size(0) * dist.get_world_size(), z.size(1))
        dist.all_gather_into_tensor(out, z)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(grad.size(0) // dist.get_world_size(), grad.size(1))
        dist.reduce_scatter_tensor(out, grad)
        return out


def contrastive(z):
    return -(z @ z.T).log_softmax(-1).diagonal().mean()


def sequential(x, w):
    w.requires_grad_()
    contrastive(x @ w).backward()
    return {"w": w.grad}


def averaged(grad):
    dist.all_reduce(grad)
    return grad / dist.get_world_size()


def dp_fixed(x, w):
    w.requires_grad_()
    contrastive(Gather.apply(x @ w)).backward()
    return {"w": averaged(w.grad)}


def dp_buggy(x, w):
    w.requires_grad_()
    z = x @ w
    parts = [torch.empty_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, z.detach())
    rank = dist.get_rank()
    contrastive(torch.cat([*parts[:rank], z, *parts[rank + 1 :]])).backward()
    return {"w": averaged(w.grad)}


ARGS = {
    "mesh": {"dp": 2},
    "inputs": {"x": gg.Input((4, 3), Shard(0)), "w": gg.Input((3, 3))},
    "outputs": {"w": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, dp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, dp_buggy, **ARGS)
