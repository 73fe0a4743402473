"""FSDP2: `fully_shard` on a plain module, verified as modules: parameters are DTensors, split over the ranks."""

import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import graphguard as gg
from graphguard import Partial, Shard

BATCH, HIDDEN, WIDTH = 8, 4, 8


def mlp():
    return nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.GELU(), nn.Linear(WIDTH, HIDDEN))


def sharded_mlp(mesh):
    model = mlp()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss(model, x, target):
    return F.mse_loss(model(x), target)


@gg.check
def fsdp_step():
    batch = gg.Input((BATCH, HIDDEN), Shard(0))
    return gg.verify_model(
        sequential=mlp,
        distributed=sharded_mlp,
        step=gg.train_step(loss, loss=Partial("avg")),
        mesh={"dp": 2},
        inputs={"x": batch, "target": batch},
    )
