"""NVIDIA/Megatron-LM #599: the gradient of a router on sequence-parallel tokens is not summed over the ranks.

The router is a plain linear layer that every rank holds, and nothing marks its weight as one whose gradient comes from
each rank's own tokens.

Also: NVIDIA/Megatron-LM #619.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, EXPERTS = 8, 4, 3
BUG_LINE = "probs = (x @ router).softmax(-1)"


def gradients(x, dy, router, experts):
    router.requires_grad_(), experts.requires_grad_()
    probs = (x @ router).softmax(-1)
    torch.einsum("te,th,ehk->tk", probs, x, experts).backward(dy)
    return {"router": router.grad, "experts": experts.grad}


def sequential(x, dy, router, experts):
    return gradients(x, dy, router, experts)


def sp_fixed(x, dy, router, experts):
    grads = gradients(x, dy, router, experts)
    for name in ("experts", "router"):
        dist.all_reduce(grads[name])
    return grads


def sp_buggy(x, dy, router, experts):
    grads = gradients(x, dy, router, experts)
    dist.all_reduce(grads["experts"])
    return grads


TOKEN_INPUT = gg.Input((TOKENS, HIDDEN), Shard(0))
ARGS = {
    "mesh": {"tp": 2},
    "inputs": {
        "x": TOKEN_INPUT,
        "dy": TOKEN_INPUT,
        "router": gg.Input((HIDDEN, EXPERTS)),
        "experts": gg.Input((EXPERTS, HIDDEN, HIDDEN)),
    },
    "outputs": {"router": Replicate(), "experts": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, sp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, sp_buggy, **ARGS)
