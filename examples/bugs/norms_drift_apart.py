"""deepspeedai/DeepSpeed #1801, bigscience-workshop/Megatron-DeepSpeed #274, #271, #307: replicated norms drift apart.

Every tensor-parallel rank holds the weight of a layer norm and the same gradient of it. The optimizer clips by a norm
that each rank takes over what it holds: the scale differs, so do the updates, and after a few steps so do the weights.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, WIDTH, MAX_NORM, RATE = 3, 4, 6, 0.1, 0.5
BUG_LINE = "total = sum(p.grad.pow(2).sum() for p in parameters)"


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def global_norm(parameters):
    gamma, weight = parameters
    total = weight.grad.pow(2).sum()
    dist.all_reduce(total)
    return (total + gamma.grad.pow(2).sum()).sqrt()


def norm_of_what_is_here(parameters):
    total = sum(p.grad.pow(2).sum() for p in parameters)
    return total.sqrt()


def train(x, dy, gamma, weight, copy, norm):
    parameters = [gamma.requires_grad_(), weight.requires_grad_()]
    optimizer = torch.optim.SGD(parameters, lr=RATE)
    for _ in range(2):
        optimizer.zero_grad()
        F.linear(copy(F.layer_norm(x, (HIDDEN,), gamma)), weight).backward(dy)
        scale = (MAX_NORM / norm(parameters)).clamp(max=1.0)
        for p in parameters:
            p.grad *= scale
        optimizer.step()
    return {"gamma": gamma.detach(), "weight": weight.detach()}


def sequential(x, dy, gamma, weight):
    return train(x, dy, gamma, weight, lambda h: h, norm_of_whole)


def norm_of_whole(parameters):
    return torch.cat([p.grad.flatten() for p in parameters]).norm()


def tp_fixed(x, dy, gamma, weight):
    return train(x, dy, gamma, weight, Copy.apply, global_norm)


def tp_buggy(x, dy, gamma, weight):
    return train(x, dy, gamma, weight, Copy.apply, norm_of_what_is_here)


ARGS = {
    "mesh": {"tp": 2},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN)),
        "dy": gg.Input((TOKENS, WIDTH), Shard(1)),
        "gamma": gg.Input((HIDDEN,)),
        "weight": gg.Input((WIDTH, HIDDEN), Shard(0)),
    },
    "outputs": {"gamma": Replicate(), "weight": Shard(0)},
}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, **ARGS)
