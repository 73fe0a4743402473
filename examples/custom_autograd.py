"""Tensor parallelism to the gradients: two autograd functions whose backward is the mirror of their forward.

`Copy` hands the input to the ranks and sums what comes back; `Sum` adds the ranks' results up and hands the gradient back.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def gradients(y, dy, **leaves):
    return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))}


def mlp(x, dy, up, down, bias):
    for leaf in (x, up, down, bias):
        leaf.requires_grad_()
    y = F.gelu(x @ up) @ down + bias
    return gradients(y, dy, x=x, up=up, down=down, bias=bias)


def tp_mlp(x, dy, up, down, bias):
    for leaf in (x, up, down, bias):
        leaf.requires_grad_()
    y = Sum.apply(F.gelu(Copy.apply(x) @ up) @ down) + bias
    return gradients(y, dy, x=x, up=up, down=down, bias=bias)


@gg.check
def mlp_with_gradients():
    return gg.verify(
        mlp,
        tp_mlp,
        mesh={"tp": 4},
        inputs={
            "x": gg.Input((6, 8)),
            "dy": gg.Input((6, 8)),
            "up": gg.Input((8, 16), Shard(1)),
            "down": gg.Input((16, 8), Shard(0)),
            "bias": gg.Input((8,)),
        },
        outputs={"y": Replicate(), "x": Replicate(), "up": Shard(1), "down": Shard(0), "bias": Replicate()},
    )
