"""pytorch/torchtitan #1733: each step of a pipeline schedule scales the gradients of all steps before it.

After each step of the schedule a stage divides its gradients by the number of microbatches. It divides all of `.grad`,
that of earlier steps too, which therefore shrinks again and again, as in a moving average.

Also: pytorch/torchtitan #1732.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

STEPS, MICROBATCHES = 2, 2
BUG_LINE = "w.grad /= MICROBATCHES"


def sequential(x, w):
    w.requires_grad_()
    losses = torch.tanh(torch.tanh(x @ w[0]) @ w[1]).pow(2).sum(-1)
    losses.mean().backward()
    return w.grad


def schedule_step(x, w):
    """Two stages: forward and backward of all microbatches of x; the gradients add up in w.grad."""
    for part in x.chunk(MICROBATCHES):
        if dist.get_rank() == 0:
            h = torch.tanh(part @ w[0])
            dist.send(h.detach(), 1)
            grad = torch.empty_like(h)
            dist.recv(grad, 1)
            h.backward(grad)
        else:
            h = torch.empty_like(part)
            dist.recv(h, 0)
            h.requires_grad_()
            torch.tanh(h @ w[0]).pow(2).sum(-1).mean().backward()
            dist.send(h.grad, 0)


def pp_fixed(x, w):
    w.requires_grad_()
    for batch in x.chunk(STEPS):
        schedule_step(batch, w)
    return w.grad / (STEPS * MICROBATCHES)


def pp_buggy(x, w):
    w.requires_grad_()
    for batch in x.chunk(STEPS):
        schedule_step(batch, w)
        w.grad /= MICROBATCHES
    return w.grad / STEPS


ARGS = {"mesh": {"pp": 2}, "inputs": {"x": gg.Input((8, 4)), "w": gg.Input((2, 4, 4), Shard(0))}}


@gg.check
def fixed():
    return gg.verify(sequential, pp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, pp_buggy, **ARGS)
