"""TrainVerify (SOSP '25): the reducer of gradients is launched before the last microbatch has been added.

Gradients are reduced in the background, in one bucket, while the last microbatch still runs. What the last microbatch adds
afterwards stays local to its rank.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

BATCH, HIDDEN, MICROBATCHES, RATE = 8, 3, 2, 0.1
BUG_LINE = "reduce(bucket, weights)  # before the last microbatch"


def loss(x, w0, w1):
    return (torch.tanh(x @ w0) @ w1).pow(2).sum(-1).mean()


def sequential(x, w0, w1):
    weights = [w0.requires_grad_(), w1.requires_grad_()]
    loss(x, *weights).backward()
    return [w.detach() - RATE * w.grad for w in weights]


def reduce(bucket, weights):
    """The mean over the ranks, of all gradients at once."""
    bucket.copy_(torch.cat([w.grad.flatten() for w in weights]))
    work = dist.all_reduce(bucket, async_op=True)
    work.wait()
    bucket /= dist.get_world_size()
    for w, grad in zip(weights, bucket.split([w.numel() for w in weights]), strict=True):
        w.grad.copy_(grad.view_as(w))


def stepped(weights):
    with torch.no_grad():
        for w in weights:
            w -= RATE * w.grad
    return [w.detach() for w in weights]


def dp_fixed(x, w0, w1):
    weights = [w0.requires_grad_(), w1.requires_grad_()]
    bucket = torch.empty(sum(w.numel() for w in weights))
    for part in x.chunk(MICROBATCHES):
        (loss(part, *weights) / MICROBATCHES).backward()
    reduce(bucket, weights)
    return stepped(weights)


def dp_buggy(x, w0, w1):
    weights = [w0.requires_grad_(), w1.requires_grad_()]
    bucket = torch.empty(sum(w.numel() for w in weights))
    for number, part in enumerate(x.chunk(MICROBATCHES), 1):
        if number == MICROBATCHES:
            reduce(bucket, weights)  # before the last microbatch
        (loss(part, *weights) / MICROBATCHES).backward()
    return stepped(weights)


MATRIX = gg.Input((HIDDEN, HIDDEN))
ARGS = {
    "mesh": {"dp": 2},
    "inputs": {"x": gg.Input((BATCH, HIDDEN), Shard(0)), "w0": MATRIX, "w1": MATRIX},
    "outputs": {"0": Replicate(), "1": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, dp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, dp_buggy, **ARGS)
