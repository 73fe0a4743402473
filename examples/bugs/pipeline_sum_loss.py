"""pytorch/torchtitan #2972: the pipeline differentiates the sum of all token losses, and divides only the number it prints.

Without a pipeline the loss is divided by the tokens of the batch before its backward. The path with a pipeline leaves
the backward to the schedule, which has the sum; the division comes after it, on the loss that is logged.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg

TOKENS, HIDDEN, VOCABULARY, MICROBATCHES = 6, 4, 5, 2
BUG_LINE = "loss.backward()  # of the sum"


def sequential(x, labels, w, head):
    w.requires_grad_(), head.requires_grad_()
    loss = F.cross_entropy(torch.tanh(x @ w) @ head, labels, reduction="sum") / TOKENS
    loss.backward()
    return {"loss": loss.detach(), "w": w.grad, "head": head.grad}


def first_stage(x, w):
    w.requires_grad_()
    for part in x.chunk(MICROBATCHES):
        h = torch.tanh(part @ w)
        dist.send(h.detach(), 1)
        grad = torch.empty_like(h)
        dist.recv(grad, 1)
        torch.autograd.backward(h, grad)
    return {"w": w.grad}


def microbatches(labels, head):
    """What the last stage receives, with the sum of its losses; the gradient goes back after each."""
    head.requires_grad_()
    for part in labels.chunk(MICROBATCHES):
        h = torch.empty(len(part), HIDDEN)
        dist.recv(h, 0)
        h.requires_grad_()
        yield F.cross_entropy(h @ head, part, reduction="sum")
        dist.send(h.grad, 0)


def pp_fixed(x, labels, w, head):
    if dist.get_rank() == 0:
        return first_stage(x, w)
    losses = []
    for loss in microbatches(labels, head):
        losses.append(loss.detach() / TOKENS)
        (loss / TOKENS).backward()
    return {"loss": sum(losses), "head": head.grad}


def pp_buggy(x, labels, w, head):
    if dist.get_rank() == 0:
        return first_stage(x, w)
    losses = []
    for loss in microbatches(labels, head):
        losses.append(loss.detach() / TOKENS)
        loss.backward()  # of the sum
    return {"loss": sum(losses), "head": head.grad}


ARGS = {
    "mesh": {"pp": 2},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN)),
        "labels": gg.Input((TOKENS,), dtype=torch.int64, low=0, high=VOCABULARY),
        "w": gg.Input((HIDDEN, HIDDEN)),
        "head": gg.Input((HIDDEN, VOCABULARY)),
    },
}


@gg.check
def fixed():
    return gg.verify(sequential, pp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, pp_buggy, **ARGS)
