"""NVIDIA/Megatron-LM #7213: counts of all microbatches so far are divided by the tokens of the last one.

A router's load is counted over the microbatches of a step, so that its balancing loss sees more than one of them. The
counts run on; the number of tokens that makes them fractions was that of the current microbatch.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, EXPERTS, MICROBATCHES = 4, 3, 4, 3
BUG_LINE = "(auxiliary(part, gate, counts / (routes.size(0) * dist.get_world_size())) / MICROBATCHES).backward()"


def auxiliary(x, gate, fractions):
    probs = (x @ gate).softmax(-1)
    return EXPERTS * (probs.mean(0) * fractions).sum()


def sequential(x, routed, gate):
    gate.requires_grad_()
    counts, seen = torch.zeros(EXPERTS), 0
    for part, routes in zip(x.unbind(), routed.unbind(), strict=True):
        counts = counts + routes.sum(0)
        seen += routes.size(0)
        (auxiliary(part, gate, counts / seen) / MICROBATCHES).backward()
    return {"gate": gate.grad}


def reduced_load(routes):
    load = routes.sum(0)
    dist.all_reduce(load)
    return load


def averaged(gate):
    dist.all_reduce(gate.grad)
    return {"gate": gate.grad / dist.get_world_size()}


def dp_fixed(x, routed, gate):
    gate.requires_grad_()
    counts, seen = torch.zeros(EXPERTS), 0
    for part, routes in zip(x.unbind(), routed.unbind(), strict=True):
        counts += reduced_load(routes)
        seen += routes.size(0) * dist.get_world_size()
        (auxiliary(part, gate, counts / seen) / MICROBATCHES).backward()
    return averaged(gate)


def dp_buggy(x, routed, gate):
    gate.requires_grad_()
    counts = torch.zeros(EXPERTS)
    for part, routes in zip(x.unbind(), routed.unbind(), strict=True):
        counts += reduced_load(routes)
        (auxiliary(part, gate, counts / (routes.size(0) * dist.get_world_size())) / MICROBATCHES).backward()
    return averaged(gate)


ARGS = {
    "mesh": {"dp": 2},
    "inputs": {
        "x": gg.Input((MICROBATCHES, TOKENS, HIDDEN), Shard(1)),
        "routed": gg.Input((MICROBATCHES, TOKENS, EXPERTS), Shard(1)),
        "gate": gg.Input((HIDDEN, EXPERTS)),
    },
    "outputs": {"gate": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, dp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, dp_buggy, **ARGS)
