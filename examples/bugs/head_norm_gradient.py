"""NVIDIA/Megatron-LM #7452: the weight of a norm that all heads share is reduced only where sequence parallelism is on.

The heads of a gated linear attention are split over the ranks. One norm of the width of a head is applied to each of
them, so its gradient is a sum over heads, of which each rank has its own: also with the sequence whole on every rank.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

SEQUENCE, HIDDEN, HEADS, HEAD = 4, 4, 4, 3
BUG_LINE = "o = F.rms_norm(o, (HEAD,), norm) * torch.sigmoid(gate)"


def attention(x, wqkv, wgate, wout, norm):
    """Linear attention without a mask, on the heads that the weights have."""
    q, k, v = torch.einsum("sh,phed->pesd", x, wqkv)
    gate = torch.einsum("sh,hed->esd", x, wgate)
    o = q @ (k.transpose(-1, -2) @ v)
    o = F.rms_norm(o, (HEAD,), norm) * torch.sigmoid(gate)
    return torch.einsum("esd,edh->sh", o, wout)


def sequential(x, dy, wqkv, wgate, wout, norm):
    norm.requires_grad_()
    attention(x, wqkv, wgate, wout, norm).backward(dy)
    return {"norm": norm.grad}


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad


def reduce_norms(grads, sequence_parallel):
    if sequence_parallel:
        for grad in grads:
            dist.all_reduce(grad)


def tp_step(x, dy, wqkv, wgate, wout, norm, always):
    norm.requires_grad_()
    Reduce.apply(attention(x, wqkv, wgate, wout, norm)).backward(dy)
    reduce_norms([norm.grad], sequence_parallel=always)
    return {"norm": norm.grad}


def tp_fixed(x, dy, wqkv, wgate, wout, norm):
    return tp_step(x, dy, wqkv, wgate, wout, norm, always=True)


def tp_buggy(x, dy, wqkv, wgate, wout, norm):
    return tp_step(x, dy, wqkv, wgate, wout, norm, always=False)


ARGS = {
    "mesh": {"tp": 2},
    "inputs": {
        "x": gg.Input((SEQUENCE, HIDDEN)),
        "dy": gg.Input((SEQUENCE, HIDDEN)),
        "wqkv": gg.Input((3, HIDDEN, HEADS, HEAD), Shard(2)),
        "wgate": gg.Input((HIDDEN, HEADS, HEAD), Shard(1)),
        "wout": gg.Input((HEADS, HEAD, HIDDEN), Shard(0)),
        "norm": gg.Input((HEAD,)),
    },
    "outputs": {"norm": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, **ARGS)
