"""PaddlePaddle/Paddle #35186, huggingface/text-generation-inference #1036: a bias is added before the sum over the ranks.

In a row-parallel linear layer each rank adds the whole bias to its partial product, and the sum over the ranks counts
it once per rank.
"""

import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

BUG_LINE = "y = F.linear(x, weight, bias)"


def sequential(x, weight, bias):
    return F.linear(x, weight, bias)


def tp_fixed(x, weight, bias):
    y = F.linear(x, weight)
    dist.all_reduce(y)
    return y + bias


def tp_buggy(x, weight, bias):
    y = F.linear(x, weight, bias)
    dist.all_reduce(y)
    return y


ARGS = {
    "mesh": {"tp": 4},
    "inputs": {"x": gg.Input((3, 8), Shard(1)), "weight": gg.Input((5, 8), Shard(1)), "bias": gg.Input((5,))},
}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, **ARGS)
