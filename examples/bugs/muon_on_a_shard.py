"""deepspeedai/DeepSpeed #8437, NVIDIA/Megatron-LM #6380: Muon orthogonalises each rank's shard of a gradient.

The Newton-Schulz iteration works on the whole matrix. On a shard it orthogonalises other rows: gradients agree to the
last digit, updates do not.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

BUG_LINE = "x = grad / grad.norm()"


def orthogonalised(grad, steps=2):
    x = grad / grad.norm()
    for _ in range(steps):
        a = x @ x.T
        x = 1.5 * x - 0.5 * a @ x
    return x


def sequential(w, grad):
    return w - 0.02 * orthogonalised(grad)


def tp_fixed(w, grad):
    rows = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, grad)
    update = orthogonalised(torch.cat(rows))
    return w - 0.02 * update.chunk(dist.get_world_size())[dist.get_rank()]


def tp_buggy(w, grad):
    return w - 0.02 * orthogonalised(grad)


ARGS = {"mesh": {"tp": 2}, "inputs": {"w": gg.Input((4, 4), Shard(0)), "grad": gg.Input((4, 4), Shard(0))}}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, **ARGS)
