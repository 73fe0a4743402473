"""NVIDIA-NeMo/Automodel #3530: a pipeline stage drops its gradients between microbatches, so that only the last one trains.

Each microbatch runs forward and backward through two stages. Whenever the stage prepares its buffers it also sets the
gradients of its parameters to None.
"""

import torch
import torch.distributed as dist

import graphguard as gg

BATCH, HIDDEN, MICROBATCHES, RATE = 6, 4, 3, 0.1
BUG_LINE = "p.grad = None"


def sequential(x, y, w0, w1):
    w0.requires_grad_(), w1.requires_grad_()
    loss = (torch.tanh(x @ w0) @ w1 - y).pow(2).sum(-1).mean()
    loss.backward()
    return {"w0": w0.detach() - RATE * w0.grad, "w1": w1.detach() - RATE * w1.grad}


def keep(parameters):
    pass


def reset(parameters):
    for p in parameters:
        p.grad = None


def first_stage(x, w0, prepare):
    for part in x.chunk(MICROBATCHES):
        prepare([w0])
        h = torch.tanh(part @ w0)
        dist.send(h.detach(), 1)
        grad = torch.empty_like(h)
        dist.recv(grad, 1)
        h.backward(grad)


def last_stage(y, w1, prepare):
    for wanted in y.chunk(MICROBATCHES):
        prepare([w1])
        h = torch.empty(BATCH // MICROBATCHES, HIDDEN)
        dist.recv(h, 0)
        h.requires_grad_()
        loss = (h @ w1 - wanted).pow(2).sum(-1).mean() / MICROBATCHES
        loss.backward()
        dist.send(h.grad, 0)


def pp_step(x, y, w0, w1, prepare):
    if dist.get_rank() == 0:
        first_stage(x, w0.requires_grad_(), prepare)
        return {"w0": w0.detach() - RATE * w0.grad, "w1": None}
    last_stage(y, w1.requires_grad_(), prepare)
    return {"w0": None, "w1": w1.detach() - RATE * w1.grad}


def pp_fixed(x, y, w0, w1):
    return pp_step(x, y, w0, w1, keep)


def pp_buggy(x, y, w0, w1):
    return pp_step(x, y, w0, w1, reset)


ROWS, MATRIX = gg.Input((BATCH, HIDDEN)), gg.Input((HIDDEN, HIDDEN))
ARGS = {"mesh": {"pp": 2}, "inputs": {"x": ROWS, "y": ROWS, "w0": MATRIX, "w1": MATRIX}}


@gg.check
def fixed():
    return gg.verify(sequential, pp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, pp_buggy, **ARGS)
