"""huggingface/accelerate #4177: context parallelism replaces every mask by a causal one.

Queries are split over the ranks, keys and values are gathered. The hook that makes attention context-parallel drops the
mask that it is given: layers with a sliding window attend to everything before them.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

SEQUENCE, HEAD, WINDOW = 8, 2, 3
BUG_LINE = "mask = distance >= 0"


def sequential(q, k, v):
    positions = torch.arange(SEQUENCE)
    distance = positions[:, None] - positions
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < WINDOW))


def gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def distance_to_keys(q):
    mine = dist.get_rank() * q.size(0) + torch.arange(q.size(0))
    return mine[:, None] - torch.arange(SEQUENCE)


def cp_fixed(q, k, v):
    distance = distance_to_keys(q)
    mask = (distance >= 0) & (distance < WINDOW)
    return F.scaled_dot_product_attention(q, gather(k), gather(v), attn_mask=mask)


def cp_buggy(q, k, v):
    distance = distance_to_keys(q)
    mask = distance >= 0
    return F.scaled_dot_product_attention(q, gather(k), gather(v), attn_mask=mask)


ARGS = {"mesh": {"cp": 2}, "inputs": {name: gg.Input((SEQUENCE, HEAD), Shard(0)) for name in ("q", "k", "v")}}


@gg.check
def fixed():
    return gg.verify(sequential, cp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, cp_buggy, **ARGS)
