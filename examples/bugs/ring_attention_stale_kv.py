"""huggingface/diffusers #14265: the backward of ring attention reads the keys and values of the first step at each step.

Keys and values travel around the ring. The forward uses what has arrived; the backward takes this rank's own keys and
values from the saved tensors each time. (Linear attention here, so that a step is two products.)
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

TOKENS, HEAD = 6, 3
BUG_LINE = "grad_q = grad_q + grad @ (v.T @ k)  # always this rank's own"


def passed_on(x):
    """This rank's tensor goes to the next rank, that of the previous one comes in."""
    rank, world = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    ops = [dist.P2POp(dist.isend, x, (rank + 1) % world), dist.P2POp(dist.irecv, received, (rank - 1) % world)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(k, v)
        out = q @ (k.T @ v)
        for _ in range(dist.get_world_size() - 1):
            k, v = passed_on(k), passed_on(v)
            out = out + q @ (k.T @ v)
        return out

    @staticmethod
    def backward(ctx, grad):
        k, v = ctx.saved_tensors
        grad_q = grad @ (v.T @ k)
        for _ in range(dist.get_world_size() - 1):
            k, v = passed_on(k), passed_on(v)
            grad_q = grad_q + grad @ (v.T @ k)
        return grad_q, None, None


class StaleRingAttention(RingAttention):
    @staticmethod
    def backward(ctx, grad):
        grad_q = torch.zeros_like(grad)
        for _ in range(dist.get_world_size()):
            k, v = ctx.saved_tensors
            grad_q = grad_q + grad @ (v.T @ k)  # always this rank's own
            k, v = passed_on(k), passed_on(v)
        return grad_q, None, None


def step(attention, q, k, v, dy):
    q.requires_grad_()
    y = attention(q, k, v)
    y.backward(dy)
    return {"y": y.detach(), "q": q.grad}


def sequential(q, k, v, dy):
    return step(lambda q, k, v: q @ (k.T @ v), q, k, v, dy)


def cp_fixed(q, k, v, dy):
    return step(RingAttention.apply, q, k, v, dy)


def cp_buggy(q, k, v, dy):
    return step(StaleRingAttention.apply, q, k, v, dy)


ARGS = {"mesh": {"cp": 3}, "inputs": {name: gg.Input((TOKENS, HEAD), Shard(0)) for name in ("q", "k", "v", "dy")}}


@gg.check
def fixed():
    return gg.verify(sequential, cp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, cp_buggy, **ARGS)
