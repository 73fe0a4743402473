"""vllm-project/tpu-inference #3435: the shared expert is never reduced.

The shared expert leaves its reduction to the layer around it, as its matrix was built with `reduce_results=False`; the
layer reduces the routed experts only. Each rank adds its own part of the shared expert to a complete sum.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

TOKENS, HIDDEN, WIDTH, EXPERTS = 3, 4, 8, 2
BUG_LINE = "return shared + routed  # shared is this rank's part"


def sequential(x, up, down, experts):
    routed = (x @ experts).sum(0)
    return torch.relu(x @ up) @ down + routed


def tp_fixed(x, up, down, experts):
    shared = torch.relu(x @ up) @ down
    routed = (x @ experts).sum(0)
    dist.all_reduce(shared)
    dist.all_reduce(routed)
    return shared + routed


def tp_buggy(x, up, down, experts):
    shared = torch.relu(x @ up) @ down
    routed = (x @ experts).sum(0)
    dist.all_reduce(routed)
    return shared + routed  # shared is this rank's part


ARGS = {
    "mesh": {"tp": 2},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN)),
        "up": gg.Input((HIDDEN, WIDTH), Shard(1)),
        "down": gg.Input((WIDTH, HIDDEN), Shard(0)),
        "experts": gg.Input((EXPERTS, HIDDEN, HIDDEN), Shard(0)),
    },
}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, **ARGS)
