"""NVIDIA/Megatron-LM #442, NVIDIA/TransformerEngine #74: the largest magnitude of a weight is taken over the wrong group.

An eight-bit weight is scaled by its largest magnitude. The weight is split over the tensor-parallel ranks, so the
largest of all parts is needed; it was taken over the data-parallel group, where all ranks hold the same part. Without
rounding the scale would cancel.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

BATCH, HIDDEN, WIDTH, LEVELS = 4, 3, 4, 127
BUG_LINE = 'dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=mesh.get_group("dp"))'


def quantised(x, amax):
    scale = amax / LEVELS
    return torch.round(x / scale) * scale


def sequential(x, weight):
    return x @ quantised(weight, weight.abs().max())


def fixed_layer(x, weight, mesh):
    amax = weight.abs().max()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=mesh.get_group("tp"))
    return x @ quantised(weight, amax)


def buggy_layer(x, weight, mesh):
    amax = weight.abs().max()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=mesh.get_group("dp"))
    return x @ quantised(weight, amax)


ARGS = {
    "mesh": {"dp": 2, "tp": 2},
    "inputs": {"x": gg.Input((BATCH, HIDDEN), {"dp": Shard(0)}), "weight": gg.Input((HIDDEN, WIDTH), {"tp": Shard(1)})},
}


@gg.check
def fixed():
    return gg.verify(sequential, fixed_layer, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, buggy_layer, **ARGS)
