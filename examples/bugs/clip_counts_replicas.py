"""NVIDIA-NeMo/RL #3788, ROCm/TransformerEngine #715, mindspore-ai/hyper-parallel #279: the norm counts replicas once per rank.

To clip, the squares of all gradients are summed over the tensor-parallel group. For sharded parameters that is right;
parameters that every rank holds are counted as often as there are ranks, and everything is clipped too much.
"""

import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

MAX_NORM = 1.0
BUG_LINE = "squares = square_sum(weight) + square_sum(norm)"


def square_sum(grad):
    return grad.pow(2).sum()


def clipped(weight, norm, squares):
    scale = (MAX_NORM / squares.sqrt()).clamp(max=1.0)
    return {"weight": weight * scale, "norm": norm * scale}


def sequential(weight, norm):
    return clipped(weight, norm, square_sum(weight) + square_sum(norm))


def tp_fixed(weight, norm):
    squares = square_sum(weight)
    dist.all_reduce(squares)
    squares = squares + square_sum(norm)
    return clipped(weight, norm, squares)


def tp_buggy(weight, norm):
    squares = square_sum(weight) + square_sum(norm)
    dist.all_reduce(squares)
    return clipped(weight, norm, squares)


# The gradients of a sharded matrix and of a replicated norm are the inputs here.
ARGS = {"mesh": {"tp": 4}, "inputs": {"weight": gg.Input((8, 3), Shard(0)), "norm": gg.Input((3,))}}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, **ARGS)
