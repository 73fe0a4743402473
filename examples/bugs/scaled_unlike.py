"""TrainVerify (SOSP '25): gradients are scaled by different numbers before they are summed.

The batch is split over two data-parallel ranks and, on each, into microbatches. Each rank divides by the number of its
own microbatches, and the mean over the ranks is taken; but one rank has more microbatches than the other.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate

BATCH, HIDDEN, SIZE, RATE = 6, 3, 1, 0.1  # four examples on one rank, two on the other
BUG_LINE = "loss = F.mse_loss(torch.tanh(part @ w), wanted) / (len(x) // SIZE) / dist.get_world_size()"


def sequential(x, y, w):
    F.mse_loss(torch.tanh(x @ w.requires_grad_()), y).backward()
    return w.detach() - RATE * w.grad


def dp_fixed(x, y, w):
    w.requires_grad_()
    for part, wanted in zip(x.split(SIZE), y.split(SIZE), strict=True):
        loss = F.mse_loss(torch.tanh(part @ w), wanted) * SIZE / BATCH
        loss.backward()
    dist.all_reduce(w.grad)
    return w.detach() - RATE * w.grad


def dp_buggy(x, y, w):
    w.requires_grad_()
    for part, wanted in zip(x.split(SIZE), y.split(SIZE), strict=True):
        loss = F.mse_loss(torch.tanh(part @ w), wanted) / (len(x) // SIZE) / dist.get_world_size()
        loss.backward()
    dist.all_reduce(w.grad)
    return w.detach() - RATE * w.grad


def four_and_two(full, coord):
    return full[:4] if coord["dp"] == 0 else full[4:]


ROWS = gg.Input((BATCH, HIDDEN), local=four_and_two)
ARGS = {"mesh": {"dp": 2}, "inputs": {"x": ROWS, "y": ROWS, "w": gg.Input((HIDDEN, HIDDEN))}, "outputs": {"out": Replicate()}}


@gg.check
def fixed():
    return gg.verify(sequential, dp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, dp_buggy, **ARGS)
