"""aws-neuron/aws-neuron-sdk #1107: an all_reduce ignores its groups and sums over all ranks.

On a mesh of data and tensor parallelism the ranks of one tensor-parallel group have the same examples. A sum over all
ranks mixes the examples of different groups.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

BATCH, HIDDEN, WIDTH = 4, 3, 8
BUG_LINE = "dist.all_reduce(y)  # all ranks, whatever groups were asked for"


class SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, group):
        y = y.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class SumOverAll(SumOver):
    @staticmethod
    def forward(ctx, y, group):
        y = y.clone()
        dist.all_reduce(y)  # all ranks, whatever groups were asked for
        return y


def sequential(x, dy, up, down):
    up.requires_grad_(), down.requires_grad_()
    y = torch.relu(x @ up) @ down
    y.backward(dy)
    return {"y": y.detach(), "up": up.grad, "down": down.grad}


def step(x, dy, up, down, mesh, reduce):
    up.requires_grad_(), down.requires_grad_()
    y = reduce.apply(torch.relu(x @ up) @ down, mesh.get_group("tp"))
    y.backward(dy)
    for grad in (up.grad, down.grad):
        dist.all_reduce(grad, group=mesh.get_group("dp"))
    return {"y": y.detach(), "up": up.grad, "down": down.grad}


def fixed_step(x, dy, up, down, mesh):
    return step(x, dy, up, down, mesh, SumOver)


def buggy_step(x, dy, up, down, mesh):
    return step(x, dy, up, down, mesh, SumOverAll)


ARGS = {
    "mesh": {"dp": 2, "tp": 2},
    "inputs": {
        "x": gg.Input((BATCH, HIDDEN), {"dp": Shard(0)}),
        "dy": gg.Input((BATCH, HIDDEN), {"dp": Shard(0)}),
        "up": gg.Input((HIDDEN, WIDTH), {"tp": Shard(1)}),
        "down": gg.Input((WIDTH, HIDDEN), {"tp": Shard(0)}),
    },
    "outputs": {"y": {"dp": Shard(0)}, "up": {"tp": Shard(1)}, "down": {"tp": Shard(0)}},
}


@gg.check
def fixed():
    return gg.verify(sequential, fixed_step, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, buggy_step, **ARGS)
