"""Published with GraphGuard (Entangle, ASPLOS '26): the auxiliary loss of a router is not divided by the number of ranks.

Every tensor-parallel rank holds all tokens and computes the whole balancing loss, and the gradients of the router are
summed over the ranks afterwards. So each rank may only contribute its share of that loss.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, EXPERTS, WEIGHT = 6, 4, 4, 0.125
BUG_LINE = "loss = local_mix(x, probs, experts, dy) + balance(probs)"


def balance(probs):
    return WEIGHT * EXPERTS * probs.mean(0).square().sum()


def mix(x, probs, experts, dy):
    """The experts' outputs, weighed by their probabilities."""
    return (torch.einsum("te,th,ehk->tk", probs, torch.tanh(x), experts) * dy).sum()


def sequential(x, dy, router, experts):
    router.requires_grad_()
    probs = (x @ router).softmax(-1)
    (mix(x, probs, experts, dy) + balance(probs)).backward()
    return router.grad


def local_mix(x, probs, experts, dy):
    first = dist.get_rank() * experts.size(0)
    return mix(x, probs[:, first : first + experts.size(0)], experts, dy)


def tp_fixed(x, dy, router, experts):
    router.requires_grad_()
    probs = (x @ router).softmax(-1)
    loss = local_mix(x, probs, experts, dy) + balance(probs) / dist.get_world_size()
    loss.backward()
    dist.all_reduce(router.grad)
    return router.grad


def tp_buggy(x, dy, router, experts):
    router.requires_grad_()
    probs = (x @ router).softmax(-1)
    loss = local_mix(x, probs, experts, dy) + balance(probs)
    loss.backward()
    dist.all_reduce(router.grad)
    return router.grad


ARGS = {
    "mesh": {"tp": 2},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN)),
        "dy": gg.Input((TOKENS, HIDDEN)),
        "router": gg.Input((HIDDEN, EXPERTS)),
        "experts": gg.Input((EXPERTS, HIDDEN, HIDDEN), Shard(0)),
    },
    "outputs": {"out": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, **ARGS)
