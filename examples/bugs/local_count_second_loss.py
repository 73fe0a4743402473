"""NVIDIA/Megatron-LM #7452: the loss of multi-token prediction is scaled by counts of one rank.

With a loss per token, all gradients are divided by the tokens of all ranks in the end. The second loss has a mask of
its own; to become a mean over its own tokens it is multiplied by the ratio of both counts, which each rank took from
its own tokens.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

BATCH, HIDDEN, OUT = 8, 4, 3
BUG_LINE = "ratio = mask.sum() / ahead.sum()"


def token_losses(x, w):
    return torch.tanh(x @ w).square().sum(-1)


def sequential(x, mask, ahead, w, v):
    w.requires_grad_(), v.requires_grad_()
    main = (token_losses(x, w) * mask).sum() / mask.sum()
    second = (token_losses(x, v) * ahead).sum() / ahead.sum()
    grads = torch.autograd.grad(main + second, (w, v))
    return {"w": grads[0], "v": grads[1]}


def finalised(loss, mask, *weights):
    """The sum of all ranks' gradients, per token of the main loss."""
    tokens = mask.sum()
    works = [dist.all_reduce(tokens, async_op=True)]
    grads = torch.autograd.grad(loss, weights)
    works += [dist.all_reduce(grad, async_op=True) for grad in grads]
    for work in works:
        work.wait()
    return {"w": grads[0] / tokens, "v": grads[1] / tokens}


def dp_fixed(x, mask, ahead, w, v):
    w.requires_grad_(), v.requires_grad_()
    counts = torch.stack([mask.sum(), ahead.sum()])
    dist.all_reduce(counts)
    ratio = counts[0] / counts[1]
    loss = (token_losses(x, w) * mask).sum() + (token_losses(x, v) * ahead).sum() * ratio
    return finalised(loss, mask, w, v)


def dp_buggy(x, mask, ahead, w, v):
    w.requires_grad_(), v.requires_grad_()
    ratio = mask.sum() / ahead.sum()
    loss = (token_losses(x, w) * mask).sum() + (token_losses(x, v) * ahead).sum() * ratio
    return finalised(loss, mask, w, v)


ARGS = {
    "mesh": {"cp": 2},
    "inputs": {
        "x": gg.Input((BATCH, HIDDEN), Shard(0)),
        "mask": gg.Input((BATCH,), Shard(0)),
        "ahead": gg.Input((BATCH,), Shard(0)),
        "w": gg.Input((HIDDEN, OUT)),
        "v": gg.Input((HIDDEN, OUT)),
    },
    "outputs": {"w": Replicate(), "v": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, dp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, dp_buggy, **ARGS)
