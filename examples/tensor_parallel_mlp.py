"""Tensor parallelism: the first matrix is split by columns, the second by rows, and the partial results are summed."""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard


def mlp(x, a, b):
    return torch.relu(x @ a) @ b


def tp_mlp(x, a, b):
    y = torch.relu(x @ a) @ b
    dist.all_reduce(y)
    return y


@gg.check
def tensor_parallel_mlp():
    return gg.verify(
        mlp,
        tp_mlp,
        mesh={"tp": 4},
        inputs={
            "x": gg.Input((8, 16)),
            "a": gg.Input((16, 64), Shard(1)),
            "b": gg.Input((64, 16), Shard(0)),
        },
    )
