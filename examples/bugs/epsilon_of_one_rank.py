"""TrainVerify (SOSP '25): a constant that is added differs on one rank.

Each rank normalises its own tokens. One rank was started with another configuration, and has another epsilon.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

TOKENS, HIDDEN, WIDTH = 6, 4, 4
BUG_LINE = "h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + (1e-5 if dist.get_rank() else 1e-3))"


def mlp(x, h, gamma, w):
    return x + torch.tanh(h * gamma @ w)


def sequential(x, gamma, w):
    h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return mlp(x, h, gamma, w)


def sp_fixed(x, gamma, w):
    h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return mlp(x, h, gamma, w)


def sp_buggy(x, gamma, w):
    h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + (1e-5 if dist.get_rank() else 1e-3))
    return mlp(x, h, gamma, w)


INPUTS = {"x": gg.Input((TOKENS, HIDDEN), Shard(0)), "gamma": gg.Input((HIDDEN,)), "w": gg.Input((HIDDEN, WIDTH))}


@gg.check
def fixed():
    return gg.verify(sequential, sp_fixed, mesh={"sp": 3}, inputs=INPUTS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, sp_buggy, mesh={"sp": 3}, inputs=INPUTS)
