"""Sequence parallelism by all-to-all (Ulysses): split by tokens outside of attention, by heads inside."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

SEQUENCE, HEADS, HEAD = 8, 4, 3


def attention(q, k, v):
    """q, k, v: [sequence, heads, head]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


def all_to_all(x, split, joined):
    """Parts of the dim `split` go to the ranks, and what comes from them is joined on the other one."""
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), split)]
    received = [torch.empty_like(part) for part in parts]
    dist.all_to_all(received, parts)
    return torch.cat(received, joined)


def exchanged_attention(q, k, v):
    q, k, v = (all_to_all(x, split=1, joined=0) for x in (q, k, v))
    return all_to_all(attention(q, k, v), split=0, joined=1)


@gg.check
def ulysses():
    inputs = {name: gg.Input((SEQUENCE, HEADS, HEAD), Shard(0)) for name in ("q", "k", "v")}
    return gg.verify(attention, exchanged_attention, mesh={"sp": 4}, inputs=inputs, outputs={"out": Shard(0)})
