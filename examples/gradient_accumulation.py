"""Gradient accumulation with unequal numbers of tokens: every microbatch is divided by the tokens of the whole batch."""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

BATCH, SEQUENCE, HIDDEN, MICROBATCHES = 8, 3, 4, 2


def token_losses(x, w, mask):
    return (torch.tanh(x @ w) ** 2).sum(-1) * mask


def step(x, mask, w):
    loss = token_losses(x, w.requires_grad_(), mask).sum() / mask.sum()
    loss.backward()
    return {"loss": loss.detach(), "w": w.grad}


def accumulating_step(x, mask, w):
    w.requires_grad_()
    tokens, total = mask.sum(), torch.zeros(())
    dist.all_reduce(tokens)
    for part, kept in zip(x.chunk(MICROBATCHES), mask.chunk(MICROBATCHES), strict=True):
        loss = token_losses(part, w, kept).sum() / tokens
        loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    dist.all_reduce(w.grad)
    return {"loss": total, "w": w.grad}


@gg.check
def masked_token_loss():
    return gg.verify(
        step,
        accumulating_step,
        mesh={"dp": 2},
        inputs={
            "x": gg.Input((BATCH, SEQUENCE, HIDDEN), Shard(0)),
            "mask": gg.Input((BATCH, SEQUENCE), Shard(0)),
            "w": gg.Input((HIDDEN, HIDDEN)),
        },
        outputs={"loss": Replicate(), "w": Replicate()},
    )
