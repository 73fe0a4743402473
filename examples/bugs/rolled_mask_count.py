"""NVIDIA/Megatron-LM #3159, #2417: the loss of the second next token is divided by the tokens of the first.

A second head predicts one token further ahead. Its mask is rolled by one and loses its last token, so it has other
tokens than the main loss; its sum was still divided by the number of the main loss's.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Partial, Replicate, Shard

BATCH, SEQUENCE, HIDDEN, WEIGHT = 4, 3, 4, 0.3
BUG_LINE = "loss = (main + WEIGHT * ahead) / tokens"


def rolled(mask):
    mask = torch.roll(mask, -1, 1)
    mask[:, -1] = 0
    return mask


def masked(x, mask, w, head):
    return ((torch.tanh(x @ w) @ head).square().sum(-1) * mask).sum()


def sequential(x, mask, w, heads):
    w.requires_grad_()
    main, ahead = masked(x, mask, w, heads[0]), masked(x, rolled(mask), w, heads[1])
    loss = main / mask.sum() + WEIGHT * ahead / rolled(mask).sum()
    loss.backward()
    return {"loss": loss.detach(), "w": w.grad}


def summed(count):
    dist.all_reduce(count)
    return count


def dp_fixed(x, mask, w, heads):
    w.requires_grad_()
    main, ahead = masked(x, mask, w, heads[0]), masked(x, rolled(mask), w, heads[1])
    loss = main / summed(mask.sum()) + WEIGHT * ahead / summed(rolled(mask).sum())
    loss.backward()
    return {"loss": loss.detach(), "w": summed(w.grad)}


def dp_buggy(x, mask, w, heads):
    w.requires_grad_()
    main, ahead = masked(x, mask, w, heads[0]), masked(x, rolled(mask), w, heads[1])
    tokens = summed(mask.sum())
    loss = (main + WEIGHT * ahead) / tokens
    loss.backward()
    return {"loss": loss.detach(), "w": summed(w.grad)}


ARGS = {
    "mesh": {"dp": 2},
    "inputs": {
        "x": gg.Input((BATCH, SEQUENCE, HIDDEN), Shard(0)),
        "mask": gg.Input((BATCH, SEQUENCE), Shard(0), low=0, high=2),
        "w": gg.Input((HIDDEN, HIDDEN)),
        "heads": gg.Input((2, HIDDEN, HIDDEN)),
    },
    "outputs": {"loss": Partial(), "w": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, dp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, dp_buggy, **ARGS)
