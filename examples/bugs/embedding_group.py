"""NVIDIA-NeMo/Megatron-Bridge #5380: a pipeline stage that holds the embedding is not in the group that sums its gradient.

The first stage embeds tokens, the last one compares with the same matrix, and the stage that predicts one token more
embeds the next tokens with a third copy. Its gradient was left out: the copies drift apart.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate

TOKENS, WORDS, HIDDEN, RATE = 4, 6, 3, 0.1
BUG_LINE = "dist.all_reduce(grad, group=first_and_last)"


def sequential(tokens, following, target, embedding, w0, w1):
    embedding.requires_grad_()
    h = torch.tanh(F.embedding(tokens, embedding) @ w0)
    h = torch.tanh(h @ w1 + F.embedding(following, embedding))
    F.cross_entropy(h @ embedding.T, target).backward()
    return embedding.detach() - RATE * embedding.grad


def stage_0(embedding, tokens, following, target, w0, w1):
    h = torch.tanh(F.embedding(tokens, embedding) @ w0)
    dist.send(h.detach(), 1)
    grad = torch.empty_like(h)
    dist.recv(grad, 1)
    h.backward(grad)


def stage_1(embedding, tokens, following, target, w0, w1):
    h = torch.empty(TOKENS, HIDDEN)
    dist.recv(h, 0)
    h.requires_grad_()
    out = torch.tanh(h @ w1 + F.embedding(following, embedding))
    dist.send(out.detach(), 2)
    grad = torch.empty_like(out)
    dist.recv(grad, 2)
    out.backward(grad)
    dist.send(h.grad, 0)


def stage_2(embedding, tokens, following, target, w0, w1):
    h = torch.empty(TOKENS, HIDDEN)
    dist.recv(h, 1)
    h.requires_grad_()
    F.cross_entropy(h @ embedding.T, target).backward()
    dist.send(h.grad, 1)


def backward(embedding, **inputs):
    embedding.requires_grad_()
    (stage_0, stage_1, stage_2)[dist.get_rank()](embedding, **inputs)
    return embedding.grad


def pp_fixed(embedding, **inputs):
    grad = backward(embedding, **inputs)
    dist.all_reduce(grad)
    return embedding.detach() - RATE * grad


def pp_buggy(embedding, **inputs):
    grad = backward(embedding, **inputs)
    first_and_last = dist.new_group([0, 2])
    if dist.get_rank() in (0, 2):
        dist.all_reduce(grad, group=first_and_last)
    return embedding.detach() - RATE * grad


IDS = gg.Input((TOKENS,), dtype=torch.int64, low=0, high=WORDS)
MATRIX = gg.Input((HIDDEN, HIDDEN))
INPUTS = {"tokens": IDS, "following": IDS, "target": IDS, "embedding": gg.Input((WORDS, HIDDEN)), "w0": MATRIX, "w1": MATRIX}
ARGS = {"mesh": {"pp": 3}, "inputs": INPUTS, "outputs": {"out": Replicate()}}


@gg.check
def fixed():
    return gg.verify(sequential, pp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, pp_buggy, **ARGS)
