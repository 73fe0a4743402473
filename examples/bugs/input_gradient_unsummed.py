"""TrainVerify (SOSP '25): the backward of a column-parallel matrix lacks its reduction.

Each rank's columns give a part of the gradient of their common input. The backward of the layer must sum the parts before
they go further down, here into the norm and the embedding.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, WORDS, HIDDEN, WIDTH = 4, 5, 3, 6
BUG_LINE = "return grad @ w, grad.T @ x  # a part of the gradient of x"


class ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad_x = grad @ w
        work = dist.all_reduce(grad_x, async_op=True)
        grad_w = grad.T @ x
        work.wait()
        return grad_x, grad_w


class ColumnLinearUnsummed(ColumnLinear):
    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.T @ x  # a part of the gradient of x


def step(linear, tokens, dy, embedding, gamma, w):
    embedding.requires_grad_(), gamma.requires_grad_(), w.requires_grad_()
    h = F.rms_norm(F.embedding(tokens, embedding), (HIDDEN,), gamma, 1e-5)
    F.silu(linear(h, w)).backward(dy)
    return {"embedding": embedding.grad, "gamma": gamma.grad, "w": w.grad}


def sequential(**inputs):
    return step(F.linear, **inputs)


def tp_fixed(**inputs):
    return step(ColumnLinear.apply, **inputs)


def tp_buggy(**inputs):
    return step(ColumnLinearUnsummed.apply, **inputs)


ARGS = {
    "mesh": {"tp": 2},
    "inputs": {
        "tokens": gg.Input((TOKENS,), dtype=torch.int64, low=0, high=WORDS),
        "dy": gg.Input((TOKENS, WIDTH), Shard(1)),
        "embedding": gg.Input((WORDS, HIDDEN)),
        "gamma": gg.Input((HIDDEN,)),
        "w": gg.Input((WIDTH, HIDDEN), Shard(0)),
    },
    "outputs": {"embedding": Replicate(), "gamma": Replicate(), "w": Shard(0)},
}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, **ARGS)
