"""pytorch/pytorch #36382, #36688: the backward of SyncBatchNorm averages the means of unequal batches.

The backward subtracts two means over the whole batch. Each rank took the mean over its own examples, and the ranks'
means were averaged: right only if all ranks have as many examples.

Also: pytorch/pytorch #22192.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

BATCH, CHANNELS, EPS = 5, 2, 1e-5  # 3 examples on one rank, 2 on the other
BUG_LINE = "means = torch.stack([grad.mean(0), (grad * normed).mean(0)])"


def summed(x):
    dist.all_reduce(x)
    return x


class SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        mean = summed(x.sum(0)) / BATCH
        variance = summed((x - mean).square().sum(0)) / BATCH
        scale = (variance + EPS).rsqrt()
        normed = (x - mean) * scale
        ctx.save_for_backward(normed, scale)
        return normed

    @staticmethod
    def backward(ctx, grad):
        normed, scale = ctx.saved_tensors
        sums = summed(torch.stack([grad.sum(0), (grad * normed).sum(0)]))
        return (grad - sums[0] / BATCH - normed * sums[1] / BATCH) * scale


class MeanOfMeans(SyncBatchNorm):
    @staticmethod
    def backward(ctx, grad):
        normed, scale = ctx.saved_tensors
        means = torch.stack([grad.mean(0), (grad * normed).mean(0)])
        means = summed(means) / dist.get_world_size()
        return (grad - means[0] - normed * means[1]) * scale


def sequential(x, dy):
    x.requires_grad_()
    normed = (x - x.mean(0)) * (x.var(0, unbiased=False) + EPS).rsqrt()
    normed.backward(dy)
    return {"y": normed.detach(), "x": x.grad}


def step(norm, x, dy):
    y = norm(x.requires_grad_())
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad}


def dp_fixed(x, dy):
    return step(SyncBatchNorm.apply, x, dy)


def dp_buggy(x, dy):
    return step(MeanOfMeans.apply, x, dy)


ARGS = {"mesh": {"dp": 2}, "inputs": {name: gg.Input((BATCH, CHANNELS), Shard(0)) for name in ("x", "dy")}}


@gg.check
def fixed():
    return gg.verify(sequential, dp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, dp_buggy, **ARGS)
