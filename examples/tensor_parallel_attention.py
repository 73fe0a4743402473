"""Grouped-query attention with rotary positions, split by heads: each rank has its query heads and their key-value heads."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

BATCH, SEQUENCE, HIDDEN, HEADS, KV_HEADS, HEAD = 2, 6, 8, 8, 4, 4


def rotate(x):
    """x: [batch, heads, sequence, head]."""
    angles = torch.arange(x.size(2))[:, None] * 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
    left, right = x.chunk(2, -1)
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)


def attention(x, wq, wk, wv, wo):
    """Of as many heads as the weights have."""
    q, k, v = (F.linear(x, w).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (wq, wk, wv))
    h = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
    return F.linear(h.transpose(1, 2).flatten(2), wo)


def tp_attention(x, wq, wk, wv, wo):
    y = attention(x, wq, wk, wv, wo)
    dist.all_reduce(y)
    return y


@gg.check
def grouped_query_attention():
    return gg.verify(
        attention,
        tp_attention,
        mesh={"tp": 4},
        inputs={
            "x": gg.Input((BATCH, SEQUENCE, HIDDEN)),
            "wq": gg.Input((HEADS * HEAD, HIDDEN), Shard(0)),
            "wk": gg.Input((KV_HEADS * HEAD, HIDDEN), Shard(0)),
            "wv": gg.Input((KV_HEADS * HEAD, HIDDEN), Shard(0)),
            "wo": gg.Input((HIDDEN, HEADS * HEAD), Shard(1)),
        },
        outputs={"out": Replicate()},
    )
