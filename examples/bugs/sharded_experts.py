"""Published with GraphGuard (Entangle, ASPLOS '26): expert weights are sharded where they should be replicated.

Under sequence parallelism each rank sends its own tokens through the experts, so it needs their whole weights. With
the weights split as tensor parallelism splits them, each token meets a part of its expert, and no sum repairs that.
"""

import torch
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, WIDTH, EXPERTS = 8, 4, 6, 2
BUG_LINE = 'hidden = F.gelu(torch.einsum("td,edf->tef", x, up))  # as much of the experts as this rank has'


def sequential(x, router, up, down):
    probs = (x @ router).softmax(-1)
    hidden = F.gelu(torch.einsum("td,edf->tef", x, up))
    return torch.einsum("te,tef,efd->td", probs, hidden, down)


def sp_experts(x, router, up, down):
    probs = (x @ router).softmax(-1)
    hidden = F.gelu(torch.einsum("td,edf->tef", x, up))  # as much of the experts as this rank has
    return torch.einsum("te,tef,efd->td", probs, hidden, down)


def arguments(up, down):
    return {
        "mesh": {"sp": 2},
        "inputs": {
            "x": gg.Input((TOKENS, HIDDEN), Shard(0)),
            "router": gg.Input((HIDDEN, EXPERTS)),
            "up": gg.Input((EXPERTS, HIDDEN, WIDTH), up),
            "down": gg.Input((EXPERTS, WIDTH, HIDDEN), down),
        },
    }


@gg.check
def fixed():
    return gg.verify(sequential, sp_experts, **arguments(Replicate(), Replicate()))


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, sp_experts, **arguments(Shard(2), Shard(1)))
