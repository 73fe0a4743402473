"""Data parallelism to the end of the step: gradients averaged over the ranks, then SGD with momentum."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard


def sgd(parameter, momentum, gradient):
    momentum = 0.9 * momentum + gradient
    return parameter - 0.1 * momentum, momentum


def step(x, target, w, momentum):
    w.requires_grad_()
    loss = F.mse_loss(torch.tanh(x @ w), target)
    loss.backward()
    with torch.no_grad():
        w, momentum = sgd(w, momentum, w.grad)
    return {"w": w, "momentum": momentum}


def dp_step(x, target, w, momentum):
    w.requires_grad_()
    loss = F.mse_loss(torch.tanh(x @ w), target)
    loss.backward()
    with torch.no_grad():
        dist.all_reduce(w.grad)
        w, momentum = sgd(w, momentum, w.grad / dist.get_world_size())
    return {"w": w, "momentum": momentum}


@gg.check
def data_parallel_step():
    return gg.verify(
        step,
        dp_step,
        mesh={"dp": 4},
        inputs={
            "x": gg.Input((16, 8), Shard(0)),
            "target": gg.Input((16, 6), Shard(0)),
            "w": gg.Input((8, 6)),
            "momentum": gg.Input((8, 6)),
        },
        outputs={"w": Replicate(), "momentum": Replicate()},
    )
