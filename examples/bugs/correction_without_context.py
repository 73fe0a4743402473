"""NovaSky-AI/SkyRL #1420: the factor that undoes the mean of data parallelism leaves out context parallelism.

Gradients are averaged over all ranks, those that share sequences included. The loss is a sum over tokens that is
already divided by all of them, so the mean has to be undone by as many ranks as it went over: dp times cp, not dp.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

BATCH, SEQUENCE, HIDDEN = 2, 4, 3
BUG_LINE = 'loss = policy_loss(x, advantages, w) * mesh["dp"].size()'


def policy_loss(x, advantages, w):
    ratio = torch.exp(torch.einsum("bsh,h->bs", torch.tanh(x), w))
    return -(ratio * advantages).sum() / (BATCH * SEQUENCE)


def sequential(x, advantages, w):
    w.requires_grad_()
    policy_loss(x, advantages, w).backward()
    return {"w": w.grad}


def averaged_gradient(loss, w):
    loss.backward()
    dist.all_reduce(w.grad)
    w.grad.div_(dist.get_world_size())
    return {"w": w.grad}


def cp_fixed(x, advantages, w, mesh):
    w.requires_grad_()
    loss = policy_loss(x, advantages, w) * mesh["dp"].size() * mesh["cp"].size()
    return averaged_gradient(loss, w)


def cp_buggy(x, advantages, w, mesh):
    w.requires_grad_()
    loss = policy_loss(x, advantages, w) * mesh["dp"].size()
    return averaged_gradient(loss, w)


SPLIT = {"dp": Shard(0), "cp": Shard(1)}
ARGS = {
    "mesh": {"dp": 2, "cp": 2},
    "inputs": {
        "x": gg.Input((BATCH, SEQUENCE, HIDDEN), SPLIT),
        "advantages": gg.Input((BATCH, SEQUENCE), SPLIT),
        "w": gg.Input((HIDDEN,)),
    },
    "outputs": {"w": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, cp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, cp_buggy, **ARGS)
