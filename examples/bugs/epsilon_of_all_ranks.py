"""TrainVerify (SOSP '25): a constant that is added differs on all ranks.

The distributed norm sums squares over a split hidden dim. Its epsilon is added to the sum, before the division by the size
that turns the sum into a mean.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

TOKENS, HIDDEN, EPS = 3, 8, 1e-2
BUG_LINE = "return x * torch.rsqrt((squares + EPS) / HIDDEN) * gamma"


def sequential(x, gamma):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * gamma


def summed_squares(x):
    squares = x.pow(2).sum(-1, keepdim=True)
    dist.all_reduce(squares)
    return squares


def tp_fixed(x, gamma):
    squares = summed_squares(x)
    return x * torch.rsqrt(squares / HIDDEN + EPS) * gamma


def tp_buggy(x, gamma):
    squares = summed_squares(x)
    return x * torch.rsqrt((squares + EPS) / HIDDEN) * gamma


INPUTS = {"x": gg.Input((TOKENS, HIDDEN), Shard(1)), "gamma": gg.Input((HIDDEN,), Shard(0))}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, mesh={"tp": 4}, inputs=INPUTS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, mesh={"tp": 4}, inputs=INPUTS)
