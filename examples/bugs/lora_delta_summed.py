"""NVIDIA-NeMo/Megatron-Bridge #5634, #5635: the LoRA delta of a split expert is whole on every rank, and summed.

The base output of a row-parallel expert is a summand on each rank; the adapter beside it is replicated. Added before
the all_reduce, the adapter counts once per rank.
"""

import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

TOKENS, WIDTH, HIDDEN, RANK = 4, 8, 3, 2
BUG_LINE = "y = h @ base + x @ lora_a @ lora_b"


def sequential(x, h, base, lora_a, lora_b):
    return h @ base + (x @ lora_a) @ lora_b


def tp_fixed(x, h, base, lora_a, lora_b):
    y = h @ base
    dist.all_reduce(y)
    return y + x @ lora_a @ lora_b


def tp_buggy(x, h, base, lora_a, lora_b):
    y = h @ base + x @ lora_a @ lora_b
    dist.all_reduce(y)
    return y


ARGS = {
    "mesh": {"etp": 2},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN)),
        "h": gg.Input((TOKENS, WIDTH), Shard(1)),
        "base": gg.Input((WIDTH, HIDDEN), Shard(0)),
        "lora_a": gg.Input((HIDDEN, RANK)),
        "lora_b": gg.Input((RANK, HIDDEN)),
    },
}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, **ARGS)
