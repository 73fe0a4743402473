"""jax-ml/jax #3970: the gradient of a loss that was summed over the ranks is counted once per rank.

Each rank differentiates the sum of all ranks' losses. A sum over ranks that autograd knows has a sum over ranks as its
backward, so each rank's gradient is already N times its own part before data parallelism sums the parts.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn

import graphguard as gg
from graphguard import Replicate, Shard

BATCH, INPUTS, CLASSES = 8, 5, 3
BUG_LINE = "loss = dist_nn.all_reduce(loss)"


def cross_entropy(x, y, w, b):
    return -(torch.log_softmax(x @ w + b, -1) * y).sum() / BATCH


def sequential(x, y, w, b):
    w.requires_grad_(), b.requires_grad_()
    loss = cross_entropy(x, y, w, b)
    loss.backward()
    return {"loss": loss.detach(), "w": w.grad, "b": b.grad}


def summed_over_ranks(*grads):
    works = [dist.all_reduce(grad, async_op=True) for grad in grads]
    for work in works:
        work.wait()


def dp_fixed(x, y, w, b):
    w.requires_grad_(), b.requires_grad_()
    loss = cross_entropy(x, y, w, b)
    loss.backward()
    loss = loss.detach()
    summed_over_ranks(loss, w.grad, b.grad)
    return {"loss": loss, "w": w.grad, "b": b.grad}


def dp_buggy(x, y, w, b):
    w.requires_grad_(), b.requires_grad_()
    loss = cross_entropy(x, y, w, b)
    loss = dist_nn.all_reduce(loss)
    loss.backward()
    summed_over_ranks(w.grad, b.grad)
    return {"loss": loss.detach(), "w": w.grad, "b": b.grad}


ARGS = {
    "mesh": {"dp": 4},
    "inputs": {
        "x": gg.Input((BATCH, INPUTS), Shard(0)),
        "y": gg.Input((BATCH, CLASSES), Shard(0)),
        "w": gg.Input((INPUTS, CLASSES)),
        "b": gg.Input((CLASSES,)),
    },
    "outputs": {"loss": Replicate(), "w": Replicate(), "b": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, dp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, dp_buggy, **ARGS)
