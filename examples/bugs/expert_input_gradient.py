"""pytorch/torchtitan #4054: the gradient that leaves tensor-parallel experts is not summed over the ranks.

Each expert is split on its hidden width; tokens and scores are the same on all ranks. The placement of their gradients
was thrown away where no expert parallelism is on: each rank's part went on as if it were the whole. The forward is
exact.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import graphguard as gg
from graphguard import Partial, Replicate, Shard

TOKENS, HIDDEN, WIDTH, EXPERTS = 6, 4, 4, 2
BUG_LINE = "return SumOverRanks.apply(experts_of(x.to_local(), scores.to_local(), up, down))"
NAMES = ("norm", "gate", "up", "down")


def experts_of(x, scores, up, down):
    hidden = F.silu(torch.einsum("th,ehf->tef", x, up))
    return torch.einsum("te,tef,efh->th", scores, hidden, down)


def layer(x, norm, gate, up, down, experts=experts_of):
    h = F.rms_norm(x, (HIDDEN,), norm)
    return x + experts(h, (h @ gate).softmax(-1), up, down)


def gradients(x, dy, norm, gate, up, down, experts=experts_of):
    weights = [weight.requires_grad_() for weight in (norm, gate, up, down)]
    layer(x, *weights, experts).backward(dy)
    return {name: weight.grad for name, weight in zip(NAMES, weights, strict=True)}


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        y = y.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad


def tp_fixed(x, dy, norm, gate, up, down, mesh):
    def experts(x, scores, up, down):
        x, scores = (DTensor.from_local(each, mesh, [Replicate()], run_check=False) for each in (x, scores))
        x, scores = (each.to_local(grad_placements=[Partial()]) for each in (x, scores))
        return SumOverRanks.apply(experts_of(x, scores, up, down))

    return gradients(x, dy, norm, gate, up, down, experts)


def tp_buggy(x, dy, norm, gate, up, down, mesh):
    def experts(x, scores, up, down):
        x, scores = (DTensor.from_local(each, mesh, [Replicate()], run_check=False) for each in (x, scores))
        # their gradients are taken for whole ones
        return SumOverRanks.apply(experts_of(x.to_local(), scores.to_local(), up, down))

    return gradients(x, dy, norm, gate, up, down, experts)


ARGS = {
    "mesh": {"tp": 2},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN)),
        "dy": gg.Input((TOKENS, HIDDEN)),
        "norm": gg.Input((HIDDEN,)),
        "gate": gg.Input((HIDDEN, EXPERTS)),
        "up": gg.Input((EXPERTS, HIDDEN, WIDTH), Shard(2)),
        "down": gg.Input((EXPERTS, WIDTH, HIDDEN), Shard(1)),
    },
    "outputs": {"norm": Replicate(), "gate": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(gradients, tp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(gradients, tp_buggy, **ARGS)
