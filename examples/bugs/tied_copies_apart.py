"""NVIDIA-NeMo/RL #227: a tied embedding becomes two parameters, and each is stepped with its own gradient.

Embedding and head are one matrix, split by words over the ranks. Wrapping the two modules made two parameters of it:
each one gets the gradient of its own use, and after one step they are no longer the same.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

TOKENS, WORDS, HIDDEN, RATE = 4, 6, 3, 0.5
BUG_LINE = "head = embedding.detach().clone().requires_grad_()"


def sequential(tokens, dy, embedding):
    for _ in range(2):
        embedding = embedding.detach().requires_grad_()
        torch.tanh(F.embedding(tokens, embedding) @ embedding.T).backward(dy)
        embedding = embedding - RATE * embedding.grad
    return embedding.detach()


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


def logits(tokens, embedding, head):
    """Of this rank's words."""
    local = tokens - dist.get_rank() * len(embedding)
    elsewhere = (local < 0) | (local >= len(embedding))
    h = F.embedding(local.masked_fill(elsewhere, 0), embedding).masked_fill(elsewhere.unsqueeze(-1), 0.0)
    return torch.tanh(SumBackward.apply(SumForward.apply(h)) @ head.T)


def tp_fixed(tokens, dy, embedding):
    for _ in range(2):
        embedding = embedding.detach().requires_grad_()
        logits(tokens, embedding, embedding).backward(dy)
        embedding = embedding - RATE * embedding.grad
    return embedding.detach()


def tp_buggy(tokens, dy, embedding):
    embedding.requires_grad_()
    head = embedding.detach().clone().requires_grad_()
    optimizer = torch.optim.SGD([embedding, head], lr=RATE)
    for _ in range(2):
        optimizer.zero_grad()
        logits(tokens, embedding, head).backward(dy)
        optimizer.step()
    return embedding.detach()


INPUTS = {
    "tokens": gg.Input((TOKENS,), dtype=torch.int64, low=0, high=WORDS),
    "dy": gg.Input((TOKENS, WORDS), Shard(1)),
    "embedding": gg.Input((WORDS, HIDDEN), Shard(0)),
}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, mesh={"tp": 2}, inputs=INPUTS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, mesh={"tp": 2}, inputs=INPUTS)
