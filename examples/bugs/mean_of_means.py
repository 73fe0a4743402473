"""huggingface/transformers #34191: gradient accumulation takes the mean of means.

Each microbatch divides its loss by its own number of tokens, and the losses are averaged. With unequal numbers of
tokens that is another loss than the mean over the whole batch: tokens of short microbatches weigh more.

Also: huggingface/transformers #35556, #37766.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

MICROBATCHES = 2
BUG_LINE = "loss = token_losses(part, w, kept).sum() / kept.sum() / MICROBATCHES"


def token_losses(x, w, mask):
    return (torch.tanh(x @ w) ** 2).sum(-1) * mask


def sequential(x, mask, w):
    w.requires_grad_()
    (token_losses(x, w, mask).sum() / mask.sum()).backward()
    return w.grad


def ga_fixed(x, mask, w):
    w.requires_grad_()
    tokens = mask.sum()
    dist.all_reduce(tokens)
    for part, kept in zip(x.chunk(MICROBATCHES), mask.chunk(MICROBATCHES), strict=True):
        loss = token_losses(part, w, kept).sum() / tokens
        loss.backward()
    dist.all_reduce(w.grad)
    return w.grad


def ga_buggy(x, mask, w):
    w.requires_grad_()
    for part, kept in zip(x.chunk(MICROBATCHES), mask.chunk(MICROBATCHES), strict=True):
        loss = token_losses(part, w, kept).sum() / kept.sum() / MICROBATCHES
        loss.backward()
    dist.all_reduce(w.grad)
    return w.grad / dist.get_world_size()


ARGS = {
    "mesh": {"dp": 2},
    "inputs": {"x": gg.Input((8, 3, 4), Shard(0)), "mask": gg.Input((8, 3), Shard(0)), "w": gg.Input((4, 4))},
    "outputs": {"out": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, ga_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, ga_buggy, **ARGS)
