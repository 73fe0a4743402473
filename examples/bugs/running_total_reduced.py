"""konstmish/prodigy #33: a running total is reduced over the ranks at each step, and what was reduced before counts again.

The optimizer estimates its step size from sums over all parameters. They are sharded, so each step's increment must be
summed over the ranks; the total that it is added to is complete already.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

ROWS, HIDDEN, BETA = 4, 3, 0.9
BUG_LINE = "dist.all_reduce(numerator)  # with what was reduced before"


def loss(w, target):
    return (torch.tanh(w) - target).pow(2).sum()


def sequential(w, target):
    start, numerator = w, torch.zeros(())
    for _ in range(2):
        grad = torch.autograd.grad(loss(w.requires_grad_(), target), w)[0]
        numerator = BETA * numerator + (grad * (start - w)).sum() + grad.pow(2).sum()
        w = (w - numerator * grad).detach()
    return {"w": w, "numerator": numerator.detach()}


def fsdp_fixed(w, target):
    start, numerator = w, torch.zeros(())
    for _ in range(2):
        grad = torch.autograd.grad(loss(w.requires_grad_(), target), w)[0]
        increment = (grad * (start - w)).sum() + grad.pow(2).sum()
        increment = increment.detach()
        dist.all_reduce(increment)
        numerator = BETA * numerator + increment
        w = (w - numerator * grad).detach()
    return {"w": w, "numerator": numerator}


def fsdp_buggy(w, target):
    start, numerator = w, torch.zeros(())
    for _ in range(2):
        grad = torch.autograd.grad(loss(w.requires_grad_(), target), w)[0]
        numerator = (BETA * numerator + (grad * (start - w)).sum() + grad.pow(2).sum()).detach()
        dist.all_reduce(numerator)  # with what was reduced before
        w = (w - numerator * grad).detach()
    return {"w": w, "numerator": numerator}


SHARDED = gg.Input((ROWS, HIDDEN), Shard(0))
ARGS = {"mesh": {"fsdp": 2}, "inputs": {"w": SHARDED, "target": SHARDED}, "outputs": {"w": Shard(0)}}


@gg.check
def fixed():
    return gg.verify(sequential, fsdp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, fsdp_buggy, **ARGS)
