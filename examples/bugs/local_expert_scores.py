"""huggingface/transformers #48205: the gradient of routing scores covers the experts of one rank only.

Tokens are the same on all ranks, experts are split. Each rank multiplies its experts' outputs by their scores and the
sum over the ranks is whole; backward, the gradient of the scores is zero for all experts of other ranks, until it is
summed.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, EXPERTS = 5, 4, 4
BUG_LINE = "mine = scores.narrow(-1, dist.get_rank() * len(experts), len(experts))"


def experts_of(x, scores, experts):
    return sum(scores[:, e, None] * F.silu(x @ expert) for e, expert in enumerate(experts))


def sequential(x, dy, router, experts):
    router.requires_grad_()
    scores = F.softmax(x @ router.T, dim=-1)
    experts_of(x, scores, experts).backward(dy)
    return {"router": router.grad}


def summed(grad):
    grad = grad.clone()
    dist.all_reduce(grad)
    return grad


class SumOverRanks(torch.autograd.Function):
    forward = staticmethod(lambda ctx, y: summed(y))
    backward = staticmethod(lambda ctx, grad: grad)


def ep_fixed(x, dy, router, experts):
    router.requires_grad_()
    scores = F.softmax(x @ router.T, dim=-1)
    scores.register_hook(summed)
    mine = scores.chunk(dist.get_world_size(), -1)[dist.get_rank()]
    SumOverRanks.apply(experts_of(x, mine, experts)).backward(dy)
    return {"router": router.grad}


def ep_buggy(x, dy, router, experts):
    router.requires_grad_()
    scores = F.softmax(x @ router.T, dim=-1)
    mine = scores.narrow(-1, dist.get_rank() * len(experts), len(experts))
    SumOverRanks.apply(experts_of(x, mine, experts)).backward(dy)
    return {"router": router.grad}


ARGS = {
    "mesh": {"ep": 4},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN)),
        "dy": gg.Input((TOKENS, HIDDEN)),
        "router": gg.Input((EXPERTS, HIDDEN)),
        "experts": gg.Input((EXPERTS, HIDDEN, HIDDEN), Shard(0)),
    },
    "outputs": {"router": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, ep_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, ep_buggy, **ARGS)
