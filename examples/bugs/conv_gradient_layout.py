"""pytorch/pytorch #191926: the gradient of a convolution's input is taken to be split by batch where it is split by width.

Kernel and stride are equal, so each rank convolves its part of the width alone. The backward is as local as the forward,
but its result was marked with the layout of another dim, and whoever needs it whole puts it together along the batch.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

BATCH, CHANNELS, FILTERS, HEIGHT, WIDTH, KERNEL = 2, 2, 3, 2, 8, 2
BUG_LINE = "return together(grad, dim=0), grad_weight, None"


def together(x, dim):
    """All ranks' parts side by side along dim, in the shape that the whole image has."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim).reshape(BATCH, CHANNELS, HEIGHT, WIDTH)


class Patches(torch.autograd.Function):
    """The convolution of this rank's part of a whole image."""

    @staticmethod
    def forward(ctx, image, weight, mesh):
        part = image.chunk(mesh.size(), dim=3)[mesh.get_local_rank()].contiguous()
        ctx.save_for_backward(part, weight)
        return F.conv2d(part, weight, stride=KERNEL)

    @staticmethod
    def backward(ctx, dy):
        part, weight = ctx.saved_tensors
        grad = torch.nn.grad.conv2d_input(part.shape, weight, dy, stride=KERNEL)
        grad_weight = torch.nn.grad.conv2d_weight(part, weight.shape, dy, stride=KERNEL)
        dist.all_reduce(grad_weight)
        return together(grad, dim=3), grad_weight, None


class PatchesWrongLayout(Patches):
    @staticmethod
    def backward(ctx, dy):
        part, weight = ctx.saved_tensors
        grad = torch.nn.grad.conv2d_input(part.shape, weight, dy, stride=KERNEL)
        grad_weight = torch.nn.grad.conv2d_weight(part, weight.shape, dy, stride=KERNEL)
        dist.all_reduce(grad_weight)
        return together(grad, dim=0), grad_weight, None


def sequential(image, weight, dy):
    image.requires_grad_(), weight.requires_grad_()
    out = F.conv2d(image, weight, stride=KERNEL)
    grads = torch.autograd.grad(out, (image, weight), dy)
    return {"out": out.detach(), "image": grads[0], "weight": grads[1]}


def split_step(image, weight, dy, mesh, patches):
    image.requires_grad_(), weight.requires_grad_()
    out = patches.apply(image, weight, mesh)
    grads = torch.autograd.grad(out, (image, weight), dy)
    return {"out": out.detach(), "image": grads[0], "weight": grads[1]}


ARGS = {
    "mesh": {"width": 2},
    "inputs": {
        "image": gg.Input((BATCH, CHANNELS, HEIGHT, WIDTH)),
        "weight": gg.Input((FILTERS, CHANNELS, KERNEL, KERNEL)),
        "dy": gg.Input((BATCH, FILTERS, HEIGHT // KERNEL, WIDTH // KERNEL), Shard(3)),
    },
    "outputs": {"out": Shard(3), "image": Replicate(), "weight": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, lambda image, weight, dy, mesh: split_step(image, weight, dy, mesh, Patches), **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(
        sequential, lambda image, weight, dy, mesh: split_step(image, weight, dy, mesh, PatchesWrongLayout), **ARGS
    )
