"""NVIDIA/Megatron-LM #7452, #7481: an in-place all_reduce overwrites the local number of tokens.

The balancing loss of a router is scaled by the tokens of this rank, as all gradients are divided by the tokens of all
ranks later. The same tensor was reduced in place to get the total, so the scale is too large by the number of ranks.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, EXPERTS = 8, 4, 3
BUG_LINE = "dist.all_reduce(total)  # in place: tokens is overwritten, too"


def sequential(x, routed, router):
    router.requires_grad_()
    probs = (x @ router).softmax(-1)
    (probs.sum(0) * routed.sum(0)).sum().div(TOKENS**2).backward()
    return {"router": router.grad}


def per_token_gradient(x, routed, router, tokens, total):
    """`tokens` is the number of this rank's tokens, `total` that of all ranks; `routed` says who went where."""
    load = routed.sum(0)
    dist.all_reduce(load)
    probs = (x @ router.requires_grad_()).softmax(-1)
    auxiliary = (probs.sum(0) * load).sum() / total**2
    (auxiliary * tokens * dist.get_world_size()).backward()
    dist.all_reduce(router.grad)
    return {"router": router.grad / total}


def sp_fixed(x, routed, router):
    tokens = torch.tensor(float(x.size(0)))
    total = tokens.clone()
    dist.all_reduce(total)
    return per_token_gradient(x, routed, router, tokens, total)


def sp_buggy(x, routed, router):
    tokens = torch.tensor(float(x.size(0)))
    total = tokens
    dist.all_reduce(total)  # in place: tokens is overwritten, too
    return per_token_gradient(x, routed, router, tokens, total)


ARGS = {
    "mesh": {"tp": 2},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN), Shard(0)),
        "routed": gg.Input((TOKENS, EXPERTS), Shard(0)),
        "router": gg.Input((HIDDEN, EXPERTS)),
    },
    "outputs": {"router": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, sp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, sp_buggy, **ARGS)
