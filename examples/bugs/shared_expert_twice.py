"""vllm-project/vllm #49122, vllm-project/vllm-gaudi #1451: the shared expert is reduced twice.

The shared expert's row-parallel matrix reduces its own output, and the layer around it reduces the sum of shared and
routed experts again, so the shared part counts once per rank.

Also: vllm-project/vllm #49366, #49378, vllm-project/vllm-ascend #10443.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

TOKENS, HIDDEN, WIDTH, EXPERTS = 3, 4, 8, 4
BUG_LINE = "dist.all_reduce(shared)"


def shared_expert(x, up, down):
    return torch.relu(x @ up) @ down


def routed_experts(x, probs, experts):
    return torch.einsum("te,th,ehk->tk", probs, x, experts)


def sequential(x, router, up, down, experts):
    probs = (x @ router).softmax(-1)
    return shared_expert(x, up, down) + routed_experts(x, probs, experts)


def own_probs(x, router):
    """The probabilities of this rank's experts."""
    return (x @ router).softmax(-1).chunk(dist.get_world_size(), -1)[dist.get_rank()]


def tp_fixed(x, router, up, down, experts):
    shared = shared_expert(x, up, down)
    y = shared + routed_experts(x, own_probs(x, router), experts)
    dist.all_reduce(y)
    return y


def tp_buggy(x, router, up, down, experts):
    shared = shared_expert(x, up, down)
    dist.all_reduce(shared)
    y = shared + routed_experts(x, own_probs(x, router), experts)
    dist.all_reduce(y)
    return y


ARGS = {
    "mesh": {"tp": 2},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN)),
        "router": gg.Input((HIDDEN, EXPERTS)),
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
