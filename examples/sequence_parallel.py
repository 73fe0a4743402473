"""Sequence parallelism between tensor-parallel products, to the gradients.

Norm and residual run on each rank's tokens. The tokens are gathered before the split matrices and summed and scattered
behind them; the gradient of the norm's weight, which every rank holds, is summed over the ranks.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, WIDTH = 8, 6, 12


def gather(x):
    out = x.new_empty(x.size(0) * dist.get_world_size(), x.size(1))
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def sum_and_scatter(x):
    out = x.new_empty(x.size(0) // dist.get_world_size(), x.size(1))
    dist.reduce_scatter_tensor(out, x.contiguous())
    return out


class Gather(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: gather(x))
    backward = staticmethod(lambda ctx, grad: sum_and_scatter(grad))


class SumAndScatter(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: sum_and_scatter(x))
    backward = staticmethod(lambda ctx, grad: gather(grad))


def block(x, dy, norm, up, down, enter=lambda x: x, leave=lambda x: x):
    for leaf in (norm, up, down):
        leaf.requires_grad_()
    h = F.gelu(enter(F.rms_norm(x, (HIDDEN,), norm, eps=1e-5)) @ up)
    y = x + leave(h @ down)
    y.backward(dy)
    return {"y": y.detach(), "norm": norm.grad, "up": up.grad, "down": down.grad}


def sp_block(x, dy, norm, up, down):
    out = block(x, dy, norm, up, down, Gather.apply, SumAndScatter.apply)
    dist.all_reduce(out["norm"])
    return out


@gg.check
def sequence_parallel_block():
    return gg.verify(
        block,
        sp_block,
        mesh={"tp": 4},
        inputs={
            "x": gg.Input((TOKENS, HIDDEN), Shard(0)),
            "dy": gg.Input((TOKENS, HIDDEN), Shard(0)),
            "norm": gg.Input((HIDDEN,)),
            "up": gg.Input((HIDDEN, WIDTH), Shard(1)),
            "down": gg.Input((WIDTH, HIDDEN), Shard(0)),
        },
        outputs={"y": Shard(0), "norm": Replicate(), "up": Shard(1), "down": Shard(0)},
    )
