"""EleutherAI/gpt-neox #905: partial logits of a row-parallel head go into the cross entropy of a split vocabulary.

The default output layer was row-parallel: each rank has all words, summed over its part of the hidden dim only. The
loss takes what it is given for this rank's words. It runs, and the loss falls.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

TOKENS, HIDDEN, WORDS = 6, 4, 8
BUG_LINE = "logits = hidden_part @ head"


def sequential(hidden, head, target):
    return F.cross_entropy(hidden @ head, target, reduction="sum")


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target):
        largest = logits.max(-1).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        logits = logits - largest.unsqueeze(-1)
        words = logits.size(-1)
        first = dist.get_rank() * words
        elsewhere = (target < first) | (target >= first + words)
        local = (target - first).masked_fill(elsewhere, 0)
        predicted = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        dist.all_reduce(predicted)
        total = logits.exp().sum(-1)
        dist.all_reduce(total)
        return total.log() - predicted


def tp_fixed(hidden, head, target):
    logits = hidden @ head
    return VocabParallelCrossEntropy.apply(logits, target).sum()


def tp_buggy(hidden, head, target):
    hidden_part = hidden.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()]
    logits = hidden_part @ head
    return VocabParallelCrossEntropy.apply(logits, target).sum()


def arguments(head):
    return {
        "mesh": {"tp": 2},
        "inputs": {
            "hidden": gg.Input((TOKENS, HIDDEN)),
            "head": gg.Input((HIDDEN, WORDS), head),
            "target": gg.Input((TOKENS,), dtype=torch.int64, low=0, high=WORDS),
        },
    }


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, **arguments(Shard(1)))


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, **arguments(Shard(0)))
