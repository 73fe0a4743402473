"""pytorch/torchtitan #1373, NVIDIA/Megatron-LM #6839: the gradient of the key that all heads share lacks other ranks' heads.

All heads share one key. Each rank expands it over its own heads, so its gradient lacks the heads of the other ranks,
unless the backward of the copy sums it. The forward is exact.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, HEADS, HEAD = 5, 6, 4, 2
BUG_LINE = "k = (x @ wk).unsqueeze(1).expand_as(q)"


class CopyToRanks(torch.autograd.Function):
    """Identity whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def backward(q, k, dy, wq, wk):
    weights = torch.einsum("qhd,khd->hqk", q, k).softmax(-1)
    torch.einsum("hqk,khd->qhd", weights, k).backward(dy)
    return {"wq": wq.grad, "wk": wk.grad}


def queries(x, wq):
    return (x @ wq).view(TOKENS, -1, HEAD)


def sequential(x, dy, wq, wk):
    wq.requires_grad_(), wk.requires_grad_()
    q = queries(x, wq)
    k = (x @ wk).unsqueeze(1).expand(-1, HEADS, -1)
    return backward(q, k, dy, wq, wk)


def tp_fixed(x, dy, wq, wk):
    wq.requires_grad_(), wk.requires_grad_()
    q = queries(x, wq)
    k = CopyToRanks.apply(x @ wk).unsqueeze(1).expand_as(q)
    return backward(q, k, dy, wq, wk)


def tp_buggy(x, dy, wq, wk):
    wq.requires_grad_(), wk.requires_grad_()
    q = queries(x, wq)
    k = (x @ wk).unsqueeze(1).expand_as(q)
    return backward(q, k, dy, wq, wk)


ARGS = {
    "mesh": {"tp": 2},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN)),
        "dy": gg.Input((TOKENS, HEADS, HEAD), Shard(1)),
        "wq": gg.Input((HIDDEN, HEADS * HEAD), Shard(1)),
        "wk": gg.Input((HIDDEN, HEAD)),
    },
    "outputs": {"wq": Shard(1), "wk": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, **ARGS)
