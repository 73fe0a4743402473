"""NVIDIA/Megatron-LM #3769: the global balancing loss of a router is too small under data parallelism.

Each rank has the load of all ranks but the probabilities of its own tokens, and divides by the square of the global
number of tokens. Its loss is a summand of the whole one; data parallelism averages where a sum is due.
"""

import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, EXPERTS = 8, 4, 3
BUG_LINE = "loss = balance(x, router, global_load(routed))"


def balance(x, router, load):
    probs = (x @ router).softmax(-1)
    return EXPERTS * (probs.sum(0) * load).sum() / TOKENS**2


def sequential(x, routed, router):
    router.requires_grad_()
    balance(x, router, routed.sum(0)).backward()
    return {"router": router.grad}


def global_load(routed):
    load = routed.sum(0)
    dist.all_reduce(load)
    return load


def averaged(grad):
    dist.all_reduce(grad)
    return grad / dist.get_world_size()


def dp_fixed(x, routed, router):
    router.requires_grad_()
    loss = balance(x, router, global_load(routed)) * dist.get_world_size()
    loss.backward()
    return {"router": averaged(router.grad)}


def dp_buggy(x, routed, router):
    router.requires_grad_()
    loss = balance(x, router, global_load(routed))
    loss.backward()
    return {"router": averaged(router.grad)}


ARGS = {
    "mesh": {"dp": 2},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN), Shard(0)),
        "routed": gg.Input((TOKENS, EXPERTS), Shard(0)),
        "router": gg.Input((HIDDEN, EXPERTS)),
    },
    "outputs": {"router": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, dp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, dp_buggy, **ARGS)
