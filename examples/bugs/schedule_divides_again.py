"""areal-project/AReaL #1273: a pipeline schedule divides a loss by the number of microbatches that is already weighted.

Each microbatch's loss is divided by the tokens of the whole batch, so the gradients only have to be added up. The
schedule treats every loss as a mean over its microbatch, and divides by their number once more.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

SAMPLES, HIDDEN, MICROBATCHES = 6, 4, 3
BUG_LINE = "return loss / len(parts)"


def stage(x, w):
    return torch.tanh(x @ w)


def weighted_loss(y, weights, total):
    return (y.square().sum(-1) * weights).sum() / total


def sequential(x, weights, w):
    w.requires_grad_()
    weighted_loss(stage(stage(x, w[0]), w[1]), weights, weights.sum()).backward()
    return w.grad


def exchange(h, w, weights, total, scaled):
    """One microbatch: the first stage sends its output and gets its gradient back, the second one has the loss."""
    if dist.get_rank() == 0:
        h = stage(h, w)
        dist.send(h.detach(), dst=1)
        grad = torch.empty_like(h)
        dist.recv(grad, src=1)
        h.backward(grad)
    else:
        h = torch.empty_like(h)
        dist.recv(h, src=0)
        h.requires_grad_()
        scaled(weighted_loss(stage(h, w), weights, total)).backward()
        dist.send(h.grad, dst=0)


def pp_fixed(x, weights, w):
    w.requires_grad_()
    parts = x.chunk(MICROBATCHES)
    for part, weight in zip(parts, weights.chunk(MICROBATCHES), strict=True):
        exchange(part, w[0], weight, weights.sum(), lambda loss: loss)
    return w.grad


def pp_buggy(x, weights, w):
    w.requires_grad_()
    parts = x.chunk(MICROBATCHES)

    def scaled(loss):
        return loss / len(parts)

    for part, weight in zip(parts, weights.chunk(MICROBATCHES), strict=True):
        exchange(part, w[0], weight, weights.sum(), scaled)
    return w.grad


ARGS = {
    "mesh": {"pp": 2},
    "inputs": {
        "x": gg.Input((SAMPLES, HIDDEN)),
        "weights": gg.Input((SAMPLES,)),
        "w": gg.Input((2, HIDDEN, HIDDEN), Shard(0)),
    },
    "outputs": {"out": Shard(0)},
}


@gg.check
def fixed():
    return gg.verify(sequential, pp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, pp_buggy, **ARGS)
