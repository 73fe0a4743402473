"""Programs that look wrong and are right: over real numbers they compute what the sequential program does."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard


def softmax(x):
    return x.softmax(-1)


def shifted_by_a_sum(x):
    """The shift is the sum of all ranks' maxima instead of their maximum. It cancels, whatever it is."""
    shift = x.amax(-1, keepdim=True)
    dist.all_reduce(shift)
    weights = (x - shift).exp()
    total = weights.sum(-1, keepdim=True)
    dist.all_reduce(total)
    return weights / total


@gg.check
def softmax_shift():
    return gg.verify(softmax, shifted_by_a_sum, mesh={"tp": 2}, inputs={"x": gg.Input((3, 8), Shard(1))})


def linear(x, weight, bias):
    return F.linear(x, weight, bias)


def bias_on_one_rank(x, weight, bias):
    """A bias before the sum counts once, where only one rank adds it."""
    y = F.linear(x, weight, bias if dist.get_rank() == 0 else None)
    dist.all_reduce(y)
    return y


@gg.check
def row_bias():
    inputs = {"x": gg.Input((3, 8), Shard(1)), "weight": gg.Input((5, 8), Shard(1)), "bias": gg.Input((5,))}
    return gg.verify(linear, bias_on_one_rank, mesh={"tp": 4}, inputs=inputs)


TOKENS = 8


def token_mean(x, w):
    w.requires_grad_()
    (torch.tanh(x @ w).sum() / TOKENS).backward()
    return w.grad


def multiplied_by_context(x, w, mesh):
    """The loss times the context-parallel size, and then a mean over all ranks, those of one context included."""
    w.requires_grad_()
    mine = TOKENS // mesh["dp"].size()
    (torch.tanh(x @ w).sum() / mine * mesh["cp"].size()).backward()
    dist.all_reduce(w.grad)
    return w.grad / dist.get_world_size()


@gg.check
def context_factor():
    inputs = {"x": gg.Input((2, TOKENS // 2, 3), {"dp": Shard(0), "cp": Shard(1)}), "w": gg.Input((3, 4))}
    mesh, outputs = {"dp": 2, "cp": 2}, {"out": Replicate()}
    return gg.verify(token_mean, multiplied_by_context, mesh=mesh, inputs=inputs, outputs=outputs)
