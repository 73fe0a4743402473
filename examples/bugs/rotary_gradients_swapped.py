"""TrainVerify (SOSP '25): the backward of the rotary embedding returns the gradients of query and key in the wrong order.

One function rotates both, and its backward turns both gradients back. Query and key have the same shape.
"""

import torch
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

TOKENS, HEADS, HEAD = 3, 2, 2
BUG_LINE = "return rotate(grad_k, -angles), rotate(grad_q, -angles), None"


def rotate(x, angles):
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1)


class Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, angles):
        ctx.save_for_backward(angles)
        return rotate(q, angles), rotate(k, angles)

    @staticmethod
    def backward(ctx, grad_q, grad_k):
        (angles,) = ctx.saved_tensors
        return rotate(grad_q, -angles), rotate(grad_k, -angles), None


class RotarySwapped(Rotary):
    @staticmethod
    def backward(ctx, grad_q, grad_k):
        (angles,) = ctx.saved_tensors
        return rotate(grad_k, -angles), rotate(grad_q, -angles), None


def step(rotary, q, k, v, dy):
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    angles = torch.arange(TOKENS)[:, None] * 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
    F.scaled_dot_product_attention(*rotary(q, k, angles), v, is_causal=True).backward(dy)
    return {"q": q.grad, "k": k.grad, "v": v.grad}


def sequential(**inputs):
    return step(lambda q, k, angles: (rotate(q, angles), rotate(k, angles)), **inputs)


def tp_fixed(**inputs):
    return step(Rotary.apply, **inputs)


def tp_buggy(**inputs):
    return step(RotarySwapped.apply, **inputs)


INPUTS = {name: gg.Input((HEADS, TOKENS, HEAD), Shard(0)) for name in ("q", "k", "v", "dy")}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, mesh={"tp": 2}, inputs=INPUTS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, mesh={"tp": 2}, inputs=INPUTS)
