"""Published with GraphGuard (Entangle, ASPLOS '26): the rotary positions of every rank begin at zero.

Each rank rotates the queries and keys of its own tokens, but counts their positions from zero, so the tokens of all
ranks but the first are rotated as if they stood at the beginning of the sequence.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

SEQUENCE, HEADS, HEAD = 8, 2, 4
BUG_LINE = "positions = torch.arange(q.size(0))  # every rank begins at zero"


def rotate(x, positions):
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def attention(q, k, v):
    weights = (torch.einsum("qhd,khd->hqk", q, k) / HEAD**0.5).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def sequential(q, k, v):
    positions = torch.arange(SEQUENCE)
    return attention(rotate(q, positions), rotate(k, positions), v)


def sp_fixed(q, k, v):
    positions = torch.arange(q.size(0)) + dist.get_rank() * q.size(0)
    return attention(rotate(q, positions), gather(rotate(k, positions)), gather(v))


def sp_buggy(q, k, v):
    positions = torch.arange(q.size(0))  # every rank begins at zero
    return attention(rotate(q, positions), gather(rotate(k, positions)), gather(v))


ARGS = {"mesh": {"sp": 4}, "inputs": {name: gg.Input((SEQUENCE, HEADS, HEAD), Shard(0)) for name in ("q", "k", "v")}}


@gg.check
def fixed():
    return gg.verify(sequential, sp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, sp_buggy, **ARGS)
