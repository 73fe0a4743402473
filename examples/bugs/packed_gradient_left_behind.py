"""feifeibear/long-context-attention #121: the backward of packed ring attention keeps gradients that belong to other ranks.

Queries, keys and values are one tensor. In the backward, keys and values travel around the ring and collect their
gradients. After the last step they are one hop from home, and the packed gradient must not be put together before it.
(Linear attention here, so that a step is two products.)
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

TOKENS, HEAD = 6, 2
BUG_LINE = "return torch.stack([dq, *grads])  # one hop from home"


def hop(x):
    """This rank's tensor goes to the next rank, that of the previous one comes in."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out = torch.empty_like(x)
    works = [dist.isend(x.contiguous(), (rank + 1) % world), dist.irecv(out, (rank - 1) % world)]
    for work in works:
        work.wait()
    return out


def ring_gradients(qkv, dy):
    """Of the queries at home, and of the keys and values where they are after the last step."""
    q, kv = qkv[0], qkv[1:]
    dq, grads = torch.zeros_like(q), torch.zeros_like(kv)
    for step in range(dist.get_world_size()):
        if step:
            kv, grads = hop(kv), hop(grads)
        k, v = kv
        dq = dq + dy @ (v.T @ k)
        grads = grads + torch.stack([v @ (dy.T @ q), k @ (q.T @ dy)])
    return dq, grads


class PackedRingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv):
        ctx.save_for_backward(qkv)
        q, kv, out = qkv[0], qkv[1:], torch.zeros_like(qkv[0])
        for step in range(dist.get_world_size()):
            kv = hop(kv) if step else kv
            out = out + q @ (kv[0].T @ kv[1])
        return out

    @staticmethod
    def backward(ctx, dy):
        dq, grads = ring_gradients(*ctx.saved_tensors, dy)
        return torch.stack([dq, *hop(grads)])


class LeftBehind(PackedRingAttention):
    @staticmethod
    def backward(ctx, dy):
        dq, grads = ring_gradients(*ctx.saved_tensors, dy)
        return torch.stack([dq, *grads])  # one hop from home


def sequential(qkv, dy):
    q, k, v = qkv.requires_grad_()
    (q @ (k.T @ v)).backward(dy)
    return qkv.grad


def cp_fixed(qkv, dy):
    PackedRingAttention.apply(qkv.requires_grad_()).backward(dy)
    return qkv.grad


def cp_buggy(qkv, dy):
    LeftBehind.apply(qkv.requires_grad_()).backward(dy)
    return qkv.grad


INPUTS = {"qkv": gg.Input((3, TOKENS, HEAD), Shard(1)), "dy": gg.Input((TOKENS, HEAD), Shard(0))}
ARGS = {"mesh": {"cp": 3}, "inputs": INPUTS, "outputs": {"out": Shard(1)}}


@gg.check
def fixed():
    return gg.verify(sequential, cp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, cp_buggy, **ARGS)
