"""facebookresearch/fairchem #269: replicas with different numbers of atoms count the same.

The loss is a mean over the atoms of all structures. Each replica took the mean over its own atoms, and data parallelism
the mean of these means, so atoms of a replica that has few of them weigh more.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

ATOMS, FEATURES, WIDTH = 7, 3, 4  # 4 atoms on one replica, 3 on the other
BUG_LINE = "loss = F.mse_loss(forces(x, up, down), target)"


def forces(x, up, down):
    return torch.tanh(x @ up) @ down


def sequential(x, target, up, down):
    up.requires_grad_(), down.requires_grad_()
    loss = F.mse_loss(forces(x, up, down), target)  # of all atoms
    loss.backward()
    return {"loss": loss.detach(), "up": up.grad, "down": down.grad}


def averaged(loss, *weights):
    """What the trainer does: gradients in one bucket, and the loss, averaged over the replicas."""
    loss.backward()
    bucket = torch.cat([loss.detach().reshape(1), *(weight.grad.flatten() for weight in weights)])
    dist.all_reduce(bucket)
    bucket /= dist.get_world_size()
    loss, up, down = bucket.split([1, *(weight.numel() for weight in weights)])
    return {"loss": loss.squeeze(), "up": up.view_as(weights[0]), "down": down.view_as(weights[1])}


def dp_fixed(x, target, up, down):
    up.requires_grad_(), down.requires_grad_()
    atoms = torch.tensor(float(len(x)))
    dist.all_reduce(atoms)
    summed = F.mse_loss(forces(x, up, down), target, reduction="sum") / FEATURES
    return averaged(summed * dist.get_world_size() / atoms, up, down)


def dp_buggy(x, target, up, down):
    up.requires_grad_(), down.requires_grad_()
    loss = F.mse_loss(forces(x, up, down), target)
    return averaged(loss, up, down)


ARGS = {
    "mesh": {"dp": 2},
    "inputs": {
        "x": gg.Input((ATOMS, FEATURES), Shard(0)),
        "target": gg.Input((ATOMS, FEATURES), Shard(0)),
        "up": gg.Input((FEATURES, WIDTH)),
        "down": gg.Input((WIDTH, FEATURES)),
    },
    "outputs": {"loss": Replicate(), "up": Replicate(), "down": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, dp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, dp_buggy, **ARGS)
