"""pytorch/pytorch #144352: the gradients of a pipeline's microbatches are added up and never divided by their number.

The loss is a mean over each microbatch. The first stage runs all forwards, then all backwards, and so does the second;
what is in `.grad` in the end is the sum over the microbatches, where the mean of the batch is asked for.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg

BATCH, HIDDEN, MICROBATCHES = 8, 3, 4
BUG_LINE = "loss.backward()"


def sequential(x, y, first, second):
    w = [first.requires_grad_(), second.requires_grad_()]
    F.mse_loss(torch.tanh(x @ w[0]) @ w[1], y).backward()
    return {"first": w[0].grad, "second": w[1].grad}


def first_stage(x, w):
    outputs = [torch.tanh(part @ w) for part in x.chunk(MICROBATCHES)]
    for work in [dist.isend(h.detach(), 1) for h in outputs]:
        work.wait()
    for h in outputs:
        grad = torch.empty_like(h)
        dist.recv(grad, 1)
        h.backward(grad)


def second_stage(x, y, w):
    inputs = [torch.empty_like(part) for part in x.chunk(MICROBATCHES)]
    for work in [dist.irecv(h, 0) for h in inputs]:
        work.wait()
    losses = [F.mse_loss(h.requires_grad_() @ w, part) for h, part in zip(inputs, y.chunk(MICROBATCHES), strict=True)]
    for loss, h in zip(losses, inputs, strict=True):
        loss.backward()
        dist.send(h.grad, 0)


def schedule(x, y, first, second):
    """Runs this rank's stage; its number and its weight."""
    stage = dist.get_rank()
    w = (first, second)[stage].requires_grad_()
    first_stage(x, w) if stage == 0 else second_stage(x, y, w)
    return stage, w


def grads_of(stage, w):
    return {("first", "second")[stage]: w.grad}


def pp_fixed(x, y, first, second):
    stage, w = schedule(x, y, first, second)
    w.grad /= MICROBATCHES
    return grads_of(stage, w)


def pp_buggy(x, y, first, second):
    stage, w = schedule(x, y, first, second)
    return grads_of(stage, w)


BATCHES, WEIGHTS = gg.Input((BATCH, HIDDEN)), gg.Input((HIDDEN, HIDDEN))
ARGS = {"mesh": {"pp": 2}, "inputs": {"x": BATCHES, "y": BATCHES, "first": WEIGHTS, "second": WEIGHTS}}


@gg.check
def fixed():
    return gg.verify(sequential, pp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, pp_buggy, **ARGS)
