"""Context parallelism: each rank has a part of the sequence, and its queries meet the keys and values of all ranks.

Rotary positions and the causal mask must know where a rank's tokens are.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

SEQUENCE, HEADS, HEAD = 8, 2, 4


def rotate(x, positions):
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def causal_attention(q, k, v, queries, keys):
    """q, k, v: [sequence, heads, head]; the positions of queries and keys."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD**0.5
    weights = scores.masked_fill(keys > queries[:, None], float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def attention(q, k, v):
    positions = torch.arange(SEQUENCE)
    return causal_attention(rotate(q, positions), rotate(k, positions), v, positions, positions)


def cp_attention(q, k, v):
    mine = dist.get_rank() * q.size(0) + torch.arange(q.size(0))
    q, k = rotate(q, mine), rotate(k, mine)
    return causal_attention(q, gather(k), gather(v), mine, torch.arange(SEQUENCE))


def two_ends(x, coord):
    """Chunk r from the front and chunk r from the back, so that every rank has as many keys to look at."""
    chunks, rank = x.chunk(4), coord["cp"]
    return torch.cat([chunks[rank], chunks[3 - rank]])


def balanced_attention(q, k, v):
    size, rank = q.size(0) // 2, dist.get_rank()
    mine = torch.cat([torch.arange(size) + rank * size, torch.arange(size) + (3 - rank) * size])
    q, k = rotate(q, mine), rotate(k, mine)
    everywhere = gather(mine)
    return causal_attention(q, gather(k), gather(v), mine, everywhere)


def verify(program, ranks):
    inputs = {name: gg.Input((SEQUENCE, HEADS, HEAD), Shard(0)) for name in ("q", "k", "v")}
    return gg.verify(attention, program, mesh={"cp": ranks}, inputs=inputs, outputs={"out": Shard(0)})


@gg.check
def gathered_keys():
    return verify(cp_attention, 4)


@gg.check
def balanced_chunks():
    inputs = {name: gg.Input((SEQUENCE, HEADS, HEAD), local=two_ends) for name in ("q", "k", "v")}
    return gg.verify(attention, balanced_attention, mesh={"cp": 2}, inputs=inputs, outputs={"out": two_ends})


# ---------------------------------------------------------------------- and what goes wrong
def own_positions(q, k, v):
    mine = torch.arange(q.size(0))
    # fault: positions_from_zero_on_each_rank
    q, k = rotate(q, mine), rotate(k, mine)
    return causal_attention(q, gather(k), gather(v), mine, torch.arange(SEQUENCE))


def own_mask(q, k, v):
    mine = dist.get_rank() * q.size(0) + torch.arange(q.size(0))
    q, k = rotate(q, mine), rotate(k, mine)
    # fault: mask_of_the_first_rank
    return causal_attention(q, gather(k), gather(v), torch.arange(q.size(0)), torch.arange(SEQUENCE))


def keys_not_rotated(q, k, v):
    mine = dist.get_rank() * q.size(0) + torch.arange(q.size(0))
    # fault: keys_gathered_unrotated
    return causal_attention(rotate(q, mine), gather(k), gather(v), mine, torch.arange(SEQUENCE))


def own_keys(q, k, v):
    mine = dist.get_rank() * q.size(0) + torch.arange(q.size(0))
    # fault: keys_of_one_rank
    return causal_attention(rotate(q, mine), rotate(k, mine), v, mine, mine)


def summed_keys(q, k, v):
    mine = dist.get_rank() * q.size(0) + torch.arange(q.size(0))
    q, k = rotate(q, mine), rotate(k, mine)
    # fault: keys_added_up
    dist.all_reduce(k), dist.all_reduce(v)
    return causal_attention(q, k, v, mine, mine)


@gg.check(expect="refuted")
def positions_from_zero_on_each_rank():
    return verify(own_positions, 2)


@gg.check(expect="refuted")
def mask_of_the_first_rank():
    return verify(own_mask, 2)


@gg.check(expect="refuted")
def keys_gathered_unrotated():
    return verify(keys_not_rotated, 2)


@gg.check(expect="refuted")
def keys_of_one_rank():
    return verify(own_keys, 2)


@gg.check(expect="refuted")
def keys_added_up():
    return verify(summed_keys, 2)
