"""NVIDIA/Megatron-LM #7452: under context parallelism a masked loss is divided by the tokens of one rank.

The ranks have parts of the same sequences. A mean over the tokens that count needs the sum and the number of all ranks;
each rank took the mean of its part, and the means were averaged as if all parts had as many tokens.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

BATCH, SEQUENCE, HIDDEN, VOCABULARY = 2, 6, 3, 4
BUG_LINE = "mean = (losses * mask).sum() / mask.sum()"


def losses_of(x, labels, w):
    logits = x @ w
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def sequential(x, labels, mask, w):
    w.requires_grad_()
    losses = losses_of(x, labels, w)
    loss = (losses * mask).sum() / mask.sum()
    loss.backward()
    return {"loss": loss.detach(), "w": w.grad}


def cp_fixed(x, labels, mask, w):
    w.requires_grad_()
    losses = losses_of(x, labels, w)
    tokens = mask.sum()
    dist.all_reduce(tokens)
    loss = (losses * mask).sum() / tokens
    loss.backward()
    report = loss.detach().clone()
    dist.all_reduce(report)
    dist.all_reduce(w.grad)
    return {"loss": report, "w": w.grad}


def cp_buggy(x, labels, mask, w):
    w.requires_grad_()
    losses = losses_of(x, labels, w)
    mean = (losses * mask).sum() / mask.sum()
    mean.backward()
    report = mean.detach() / dist.get_world_size()
    dist.all_reduce(report)
    dist.all_reduce(w.grad)
    return {"loss": report, "w": w.grad / dist.get_world_size()}


ARGS = {
    "mesh": {"cp": 2},
    "inputs": {
        "x": gg.Input((BATCH, SEQUENCE, HIDDEN), Shard(1)),
        "labels": gg.Input((BATCH, SEQUENCE), Shard(1), torch.int64, low=0, high=VOCABULARY),
        "mask": gg.Input((BATCH, SEQUENCE), Shard(1)),
        "w": gg.Input((HIDDEN, VOCABULARY)),
    },
    "outputs": {"loss": Replicate(), "w": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, cp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, cp_buggy, **ARGS)
