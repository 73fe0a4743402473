"""TrainVerify (SOSP '25): an exponent differs on one rank.

The rotary frequencies are powers of a base. Heads are split over the ranks; one rank divides the exponent by the size of
half a head, and turns its heads at other speeds.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

TOKENS, HEADS, HEAD, BASE = 5, 2, 4, 10000.0
BUG_LINE = "inverse = BASE ** (-torch.arange(0, HEAD, 2) / (HEAD // 2 if dist.get_rank() == 1 else HEAD))"


def scores(q, k, inverse):
    angles = torch.arange(TOKENS)[:, None] * inverse
    cos, sin = angles.cos(), angles.sin()

    def rotate(x):
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)

    return (rotate(q) @ rotate(k).transpose(-1, -2)).softmax(-1)


def sequential(q, k):
    return scores(q, k, BASE ** (-torch.arange(0, HEAD, 2) / HEAD))


def tp_fixed(q, k):
    inverse = BASE ** (-torch.arange(0, HEAD, 2) / HEAD)
    return scores(q, k, inverse)


def tp_buggy(q, k):
    inverse = BASE ** (-torch.arange(0, HEAD, 2) / (HEAD // 2 if dist.get_rank() == 1 else HEAD))
    return scores(q, k, inverse)


ROTATED = gg.Input((HEADS, TOKENS, HEAD), Shard(0))


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, mesh={"tp": 2}, inputs={"q": ROTATED, "k": ROTATED})


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, mesh={"tp": 2}, inputs={"q": ROTATED, "k": ROTATED})
