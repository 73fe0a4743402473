"""radixark/miles #2723: a fused backward puts gradients into one buffer, and another one is reduced.

The fused weight gradient is added to `main_grad`; `.grad` is an empty stand-in that only keeps autograd content. The hook that
data parallelism runs after the backward reduces `.grad`, and the optimizer steps with `main_grad`.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

BATCH, HIDDEN, RANK, LR = 8, 4, 2, 0.1
BUG_LINE = "dist.all_reduce(parameter.grad)"


class FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        ctx.w = w
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        ctx.w.main_grad += x.T @ grad
        return grad @ ctx.w.T, torch.zeros_like(ctx.w)


def backward(x, dy, base, parameters):
    for parameter in parameters:
        parameter.requires_grad_()
        parameter.main_grad = torch.zeros_like(parameter)
    a, b = parameters
    y = torch.tanh(x @ base) + FusedLinear.apply(FusedLinear.apply(x, a), b)
    y.backward(dy)


def stepped(parameters):
    a, b = (parameter.detach() - LR * parameter.main_grad for parameter in parameters)
    return {"a": a, "b": b}


def sequential(x, dy, base, a, b):
    backward(x, dy, base, [a, b])
    return stepped([a, b])


def dp_fixed(x, dy, base, a, b):
    backward(x, dy, base, [a, b])
    for parameter in (a, b):
        dist.all_reduce(parameter.main_grad)
    return stepped([a, b])


def dp_buggy(x, dy, base, a, b):
    backward(x, dy, base, [a, b])
    for parameter in (a, b):
        dist.all_reduce(parameter.grad)
    return stepped([a, b])


ROWS = gg.Input((BATCH, HIDDEN), Shard(0))
ARGS = {
    "mesh": {"dp": 2},
    "inputs": {
        "x": ROWS,
        "dy": ROWS,
        "base": gg.Input((HIDDEN, HIDDEN)),
        "a": gg.Input((HIDDEN, RANK)),
        "b": gg.Input((RANK, HIDDEN)),
    },
    "outputs": {"a": Replicate(), "b": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, dp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, dp_buggy, **ARGS)
