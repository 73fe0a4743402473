"""TrainVerify (SOSP '25): a backward reads the wrong saved tensor.

The derivative of the gate is a function of what went into it. The fused backward takes the gated product that was saved
beside it; shapes agree, and the forward is exact.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

TOKENS, HIDDEN, WIDTH = 4, 3, 6
BUG_LINE = "sigmoid = torch.sigmoid(product)"


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        product = F.silu(gate) * up
        ctx.save_for_backward(gate, up, product)
        return product

    @staticmethod
    def backward(ctx, grad):
        gate, up, _ = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid


class SwiGLUWrong(SwiGLU):
    @staticmethod
    def backward(ctx, grad):
        gate, up, product = ctx.saved_tensors
        sigmoid = torch.sigmoid(product)
        return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid


def weights_of(gate, up, down):
    return gate.requires_grad_(), up.requires_grad_(), down.requires_grad_()


def sequential(x, dy, gate, up, down):
    weights = weights_of(gate, up, down)
    y = (F.silu(x @ gate) * (x @ up)) @ down
    return dict(zip(("gate", "up", "down"), torch.autograd.grad(y, weights, dy), strict=True)) | {"y": y.detach()}


def tp_step(x, dy, gate, up, down, swiglu):
    weights = weights_of(gate, up, down)
    y = swiglu.apply(x @ gate, x @ up) @ down
    grads = dict(zip(("gate", "up", "down"), torch.autograd.grad(y, weights, dy), strict=True))
    y = y.detach()
    dist.all_reduce(y)
    return grads | {"y": y}


def tp_fixed(**inputs):
    return tp_step(**inputs, swiglu=SwiGLU)


def tp_buggy(**inputs):
    return tp_step(**inputs, swiglu=SwiGLUWrong)


COLUMNS, ROWS = gg.Input((HIDDEN, WIDTH), Shard(1)), gg.Input((WIDTH, HIDDEN), Shard(0))
TOKENS_IN = gg.Input((TOKENS, HIDDEN))
ARGS = {"mesh": {"tp": 2}, "inputs": {"x": TOKENS_IN, "dy": TOKENS_IN, "gate": COLUMNS, "up": COLUMNS, "down": ROWS}}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, **ARGS)
