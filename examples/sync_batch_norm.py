"""Batch statistics over ranks with unequal batches: 5 examples, 3 of them on one rank and 2 on the other.

Sums can be added up, means cannot: a mean of two ranks' means is the mean of all only if both have as many examples. The same
holds for the two means that the backward subtracts. GraphGuard knows each rank's count, so it proves the one and refutes the
other; with equal batches, the mean of means is right, and is proved.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

CHANNELS, EPS = 2, 1e-5


def summed(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


def by_sums(x):
    count = summed(torch.tensor(float(x.size(0))))
    return summed(x.sum(0)) / count


def by_means(x):
    # fault: means_of_unequal_batches, means_in_the_backward
    return summed(x.mean(0)) / dist.get_world_size()


def by_own(x):
    # fault: gradient_of_own_statistics
    return x.mean(0)


def by_own_count(x):
    # fault: divided_by_own_count
    return summed(x.sum(0)) / x.size(0)


class BatchNorm(torch.autograd.Function):
    """Normalises over the batch. `forth` and `back` take the mean over all examples, in the two directions."""

    @staticmethod
    def forward(ctx, x, scale, forth, back):
        middle = forth(x)
        inverse = (forth((x - middle).square()) + EPS).rsqrt()
        normed = (x - middle) * inverse
        ctx.back = back
        ctx.save_for_backward(normed, inverse, scale)
        return normed * scale

    @staticmethod
    def backward(ctx, dy):
        normed, inverse, scale = ctx.saved_tensors
        grad = dy * scale
        dx = (grad - ctx.back(grad) - normed * ctx.back(grad * normed)) * inverse
        return dx, summed((dy * normed).sum(0)), None, None


def sequential(x, scale, dy):
    x.requires_grad_(), scale.requires_grad_()
    y = (x - x.mean(0)) * (x.var(0, unbiased=False) + EPS).rsqrt() * scale
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad, "scale": scale.grad}


def synchronised(forth, back):
    def program(x, scale, dy):
        x.requires_grad_(), scale.requires_grad_()
        y = BatchNorm.apply(x, scale, forth, back)
        y.backward(dy)
        return {"y": y.detach(), "x": x.grad, "scale": scale.grad}

    return program


def check(examples, forth, back):
    rows = gg.Input((examples, CHANNELS), Shard(0))
    inputs = {"x": rows, "scale": gg.Input((CHANNELS,)), "dy": rows}
    outputs = {"y": Shard(0), "x": Shard(0), "scale": Replicate()}
    return gg.verify(sequential, synchronised(forth, back), mesh={"dp": 2}, inputs=inputs, outputs=outputs)


@gg.check
def unequal_batches():
    return check(5, by_sums, by_sums)


@gg.check
def equal_batches_by_means():
    return check(6, by_means, by_means)


@gg.check(expect="refuted")
def means_of_unequal_batches():
    return check(5, by_means, by_means)


@gg.check(expect="refuted")
def means_in_the_backward():
    return check(5, by_sums, by_means)


@gg.check(expect="refuted")
def gradient_of_own_statistics():
    return check(6, by_sums, by_own)


@gg.check(expect="refuted")
def divided_by_own_count():
    return check(5, by_own_count, by_sums)
