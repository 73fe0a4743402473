"""NVIDIA/Megatron-LM #4070: the loss of an indexer is not divided by the number of microbatches.

Each microbatch's main loss is divided by their number. The indexer of a sparse attention learns from a loss of its own,
which is attached to the forward and gets the gradient one, whatever the number of microbatches is.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

BATCH, SEQUENCE, HIDDEN, MICROBATCHES = 8, 3, 4, 4
BUG_LINE = "return grad, torch.ones_like(loss)"


class Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss):
        ctx.save_for_backward(loss)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (loss,) = ctx.saved_tensors
        return grad, torch.full_like(loss, 1 / MICROBATCHES)


class AttachUnscaled(Attach):
    @staticmethod
    def backward(ctx, grad):
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


def attention(x, wqkv, windex, attach):
    """The indexer imitates the attention weights, which it does not change."""
    q, k, v = (x @ wqkv).chunk(3, -1)
    weights = (q @ k.mT).softmax(-1)
    guess = (x @ windex @ x.mT).log_softmax(-1)
    indexer_loss = -(weights.detach() * guess).sum(-1).mean()
    return attach(weights @ v, indexer_loss)


def sequential(x, y, wqkv, windex):
    wqkv.requires_grad_(), windex.requires_grad_()
    losses = []
    out = attention(x, wqkv, windex, lambda h, loss: losses.append(loss) or h)
    (F.mse_loss(out, y) + losses[0]).backward()
    return {"wqkv": wqkv.grad, "windex": windex.grad}


def accumulated(x, y, wqkv, windex, attach):
    wqkv.requires_grad_(), windex.requires_grad_()
    for part, wanted in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        loss = F.mse_loss(attention(part, wqkv, windex, attach), wanted)
        (loss / MICROBATCHES).backward()
    for weight in (wqkv, windex):
        dist.all_reduce(weight.grad)
        weight.grad.div_(dist.get_world_size())
    return {"wqkv": wqkv.grad, "windex": windex.grad}


def dp_fixed(x, y, wqkv, windex):
    return accumulated(x, y, wqkv, windex, Attach.apply)


def dp_buggy(x, y, wqkv, windex):
    return accumulated(x, y, wqkv, windex, AttachUnscaled.apply)


TOKENS = gg.Input((BATCH, SEQUENCE, HIDDEN), Shard(0))
ARGS = {
    "mesh": {"dp": 2},
    "inputs": {"x": TOKENS, "y": TOKENS, "wqkv": gg.Input((HIDDEN, 3 * HIDDEN)), "windex": gg.Input((HIDDEN, HIDDEN))},
    "outputs": {"wqkv": Replicate(), "windex": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, dp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, dp_buggy, **ARGS)
