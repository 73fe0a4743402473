"""huggingface/transformers #45473: scores of the local experts are paired with the expert indices of all slots.

The router gives each token its best experts: scores and indices, slot by slot. Under expert parallelism the scores were
scattered into a column per expert and cut to the columns of the rank, while the indices stayed as they were. The layer
multiplies slot by slot; where a rank has as many experts as a token has slots, nothing complains.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

TOKENS, HIDDEN, EXPERTS, SLOTS = 6, 4, 4, 2
BUG_LINE = "scores = everywhere[:, first : first + len(experts)]"


def route(x, router):
    scores, indices = torch.topk((x @ router).softmax(-1), SLOTS, dim=-1)
    return scores / scores.sum(-1, keepdim=True), indices


def apply_experts(x, scores, indices, experts, first=0):
    out = torch.zeros_like(x)
    for number, weight in enumerate(experts):
        chosen = indices == first + number
        out = out + (scores * chosen).sum(-1, keepdim=True) * torch.tanh(x @ weight)
    return out


def sequential(x, router, experts):
    scores, indices = route(x, router)
    return apply_experts(x, scores, indices, experts)


def ep_fixed(x, router, experts):
    first = dist.get_rank() * len(experts)
    scores, indices = route(x, router)
    local = (indices >= first) & (indices < first + len(experts))
    scores = scores.masked_fill(~local, 0.0)
    out = apply_experts(x, scores, indices, experts, first)
    dist.all_reduce(out)
    return out


def ep_buggy(x, router, experts):
    first = dist.get_rank() * len(experts)
    scores, indices = route(x, router)
    everywhere = x.new_zeros(x.size(0), EXPERTS).scatter(1, indices, scores)
    scores = everywhere[:, first : first + len(experts)]
    out = apply_experts(x, scores, indices, experts, first)
    dist.all_reduce(out)
    return out


ARGS = {
    "mesh": {"ep": 2},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN)),
        "router": gg.Input((HIDDEN, EXPERTS)),
        "experts": gg.Input((EXPERTS, HIDDEN, HIDDEN), Shard(0)),
    },
}


@gg.check
def fixed():
    return gg.verify(sequential, ep_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, ep_buggy, **ARGS)
