"""sgl-project/sglang #20967: with more ranks than key heads, the norm of the keys cuts heads in two.

Two ranks share a key head. The norm's weight was cut evenly over the ranks, so each rank holds half a head of it, and
normalises its head in two halves, both with that half of the weight.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

TOKENS, HIDDEN, HEADS, KEY_HEADS, HEAD = 5, 4, 4, 2, 4
BUG_LINE = "k = rms_norm(x @ wk, k_norm.view(dist.get_world_size(), -1)[dist.get_rank()])"


def rms_norm(x, weight):
    """Normalise pieces of the weight's size."""
    pieces = x.unflatten(-1, (-1, weight.size(-1)))
    return (pieces * torch.rsqrt(pieces.pow(2).mean(-1, keepdim=True) + 1e-6) * weight).flatten(-2)


def attention(q, k, v):
    q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(len(q) // len(t), dim=0) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)


def sequential(x, wq, wk, wv, wo, k_norm):
    k = rms_norm(x @ wk, k_norm.view(KEY_HEADS, HEAD))
    return attention(x @ wq, k, x @ wv) @ wo


def tp_fixed(x, wq, wk, wv, wo, k_norm):
    k = rms_norm(x @ wk, k_norm.view(KEY_HEADS, -1)[dist.get_rank() * KEY_HEADS // dist.get_world_size()])
    y = attention(x @ wq, k, x @ wv) @ wo
    dist.all_reduce(y)
    return y


def tp_buggy(x, wq, wk, wv, wo, k_norm):
    k = rms_norm(x @ wk, k_norm.view(dist.get_world_size(), -1)[dist.get_rank()])
    y = attention(x @ wq, k, x @ wv) @ wo
    dist.all_reduce(y)
    return y


def own_key_head(full, coord):
    return full.chunk(KEY_HEADS, dim=1)[coord["tp"] // 2]


KEYS = gg.Input((HIDDEN, KEY_HEADS * HEAD), local=own_key_head)
ARGS = {
    "mesh": {"tp": 4},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN)),
        "wq": gg.Input((HIDDEN, HEADS * HEAD), Shard(1)),
        "wk": KEYS,
        "wv": KEYS,
        "wo": gg.Input((HEADS * HEAD, HIDDEN), Shard(0)),
        "k_norm": gg.Input((KEY_HEADS * HEAD,)),
    },
}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, **ARGS)
