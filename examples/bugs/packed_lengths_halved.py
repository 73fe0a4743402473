"""NVIDIA/TransformerEngine #3331: each rank's share of a packed sequence is taken to be its length over the ranks.

Documents of unequal length lie one after the other, each padded so that it divides by the ranks; a rank has its part of
each. The padding is at the end, so the last rank has fewer real keys. Dividing the real length drops keys of the first.
"""

import torch
import torch.distributed as dist

import graphguard as gg

LENGTHS, PADDED, HEAD = (3, 5), (4, 6), 2
BUG_LINE = "real = gather(valid([length // dist.get_world_size() for length in LENGTHS], sizes))"


def attention(q, k, v, document_of_q, document_of_k, real):
    """Every query sees the real keys of its document."""
    seen = (document_of_q[:, None] == document_of_k) & real
    scores = (q @ k.T / HEAD**0.5).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v


def documents(sizes):
    return torch.cat([torch.full((size,), number) for number, size in enumerate(sizes)])


def valid(counts, sizes):
    """Which tokens of each document are real, where the first `count` ones of it are."""
    return torch.cat([torch.arange(size) < count for count, size in zip(counts, sizes, strict=True)])


def sequential(q, k, v):
    whole = documents(PADDED)
    return attention(q, k, v, whole, whole, valid(LENGTHS, PADDED))


def gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def cp_fixed(q, k, v):
    sizes = [padded // dist.get_world_size() for padded in PADDED]
    counts = [min(max(length - dist.get_rank() * size, 0), size) for length, size in zip(LENGTHS, sizes, strict=True)]
    own, real = documents(sizes), gather(valid(counts, sizes))
    return attention(q, gather(k), gather(v), own, gather(own), real)


def cp_buggy(q, k, v):
    sizes = [padded // dist.get_world_size() for padded in PADDED]
    own = documents(sizes)
    real = gather(valid([length // dist.get_world_size() for length in LENGTHS], sizes))
    return attention(q, gather(k), gather(v), own, gather(own), real)


def part_of_each(full, coord):
    return torch.cat([document.chunk(2)[coord["cp"]] for document in full.split(PADDED)])


TOKENS = gg.Input((sum(PADDED), HEAD), local=part_of_each)
ARGS = {"mesh": {"cp": 2}, "inputs": {"q": TOKENS, "k": TOKENS, "v": TOKENS}, "outputs": {"out": part_of_each}}


@gg.check
def fixed():
    return gg.verify(sequential, cp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, cp_buggy, **ARGS)
