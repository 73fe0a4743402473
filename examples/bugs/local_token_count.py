"""huggingface/transformers #34373, #37474: the loss is divided by the number of tokens of one device.

Labels that are padding do not count. Over all microbatches and devices the loss is to be divided by the number of
tokens that do; each device counted its own, and the mean over the devices that data parallelism takes was not undone.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

BATCH, HIDDEN, VOCABULARY, MICROBATCHES, PADDING = 8, 4, 5, 2, 0
BUG_LINE = "tokens = (labels != PADDING).sum()"


def summed_loss(x, labels, w):
    return F.cross_entropy(x @ w, labels, ignore_index=PADDING, reduction="sum")


def sequential(x, labels, w):
    w.requires_grad_()
    (summed_loss(x, labels, w) / (labels != PADDING).sum()).backward()
    return {"w": w.grad}


def accumulated(x, labels, w, tokens):
    """Gradients of all microbatches of this rank, then the mean over the ranks, as DDP takes it."""
    w.requires_grad_()
    for part, wanted in zip(x.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True):
        loss = summed_loss(part, wanted, w) / tokens
        loss.backward()
    dist.all_reduce(w.grad)
    w.grad /= dist.get_world_size()
    return {"w": w.grad}


def dp_fixed(x, labels, w):
    count = (labels != PADDING).sum()
    dist.all_reduce(count)
    return accumulated(x, labels, w, count / dist.get_world_size())


def dp_buggy(x, labels, w):
    tokens = (labels != PADDING).sum()
    return accumulated(x, labels, w, tokens)


ARGS = {
    "mesh": {"dp": 2},
    "inputs": {
        "x": gg.Input((BATCH, HIDDEN), Shard(0)),
        "labels": gg.Input((BATCH,), Shard(0), torch.int64, low=0, high=VOCABULARY),
        "w": gg.Input((HIDDEN, VOCABULARY)),
    },
    "outputs": {"w": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, dp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, dp_buggy, **ARGS)
