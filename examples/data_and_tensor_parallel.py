"""A mesh of two axes: the batch split over `dp`, the matrices over `tp`, one step of SGD.

Activations are summed over `tp`, gradients are averaged over `dp`, and neither crosses the other axis.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

BATCH, HIDDEN, WIDTH, LR = 8, 6, 8, 0.1


class Sum(torch.autograd.Function):
    """Sum over the group; the gradient passes."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def step(x, target, up, down):
    up.requires_grad_(), down.requires_grad_()
    loss = F.mse_loss(F.gelu(x @ up) @ down, target)
    loss.backward()
    return {"loss": loss.detach(), "up": up.detach() - LR * up.grad, "down": down.detach() - LR * down.grad}


def step_2d(x, target, up, down, mesh):
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    up.requires_grad_(), down.requires_grad_()
    loss = F.mse_loss(Sum.apply(F.gelu(x @ up) @ down, tp), target)
    loss.backward()
    mean = loss.detach().clone()
    for each in (mean, up.grad, down.grad):
        dist.all_reduce(each, group=dp)
        each /= dist.get_world_size(dp)
    return {"loss": mean, "up": up.detach() - LR * up.grad, "down": down.detach() - LR * down.grad}


@gg.check
def sgd_on_two_axes():
    columns, rows = {"tp": Shard(1)}, {"tp": Shard(0)}
    return gg.verify(
        step,
        step_2d,
        mesh={"dp": 2, "tp": 2},
        inputs={
            "x": gg.Input((BATCH, HIDDEN), {"dp": Shard(0)}),
            "target": gg.Input((BATCH, HIDDEN), {"dp": Shard(0)}),
            "up": gg.Input((HIDDEN, WIDTH), columns),
            "down": gg.Input((WIDTH, HIDDEN), rows),
        },
        outputs={"loss": {}, "up": columns, "down": rows},
    )
