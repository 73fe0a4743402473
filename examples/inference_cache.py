"""Decoding with tensor parallelism: each rank keeps the keys and values of its own heads, and the logits are gathered.

A prompt fills the cache, one more token is decoded. The second check keeps the cache as small integers, with one scale for each
token and head: rounding is a function of a value and its scale, and each rank has both.
"""

import math

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

BATCH, PROMPT, HIDDEN, HEADS, HEAD, WORDS = 2, 3, 6, 4, 2, 8


class Plain:
    """Keeps keys and values as they are."""

    def __init__(self):
        self.held = None

    def add(self, new):
        self.held = new if self.held is None else torch.cat([self.held, new], 2)
        return self.held


class Quantised(Plain):
    """Keeps what integers between -127 and 127 and a scale stand for."""

    def add(self, new):
        scale = new.abs().amax(-1, keepdim=True) / 127
        integers = (new / scale).round().to(torch.int8)
        return super().add(integers.to(new.dtype) * scale)


def decode(tokens, cache, table, wq, wk, wv, wo, head):
    """One call of the model: what is new attends to itself and to what the cache has."""
    x = table[tokens]
    q, k, v = ((x @ w).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (wq, wk, wv))
    k, v = cache[0].add(k), cache[1].add(v)
    seen = torch.arange(k.size(2)) <= torch.arange(k.size(2) - q.size(2), k.size(2))[:, None]
    scores = (q @ k.mT / math.sqrt(HEAD)).masked_fill(~seen, -math.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ wo
    if dist.is_initialized():
        dist.all_reduce(out)
    logits = (x + out) @ head
    if not dist.is_initialized():
        return logits
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits)
    return torch.cat(parts, -1)


def generate(cache, prompt, token, **weights):
    pair = cache(), cache()
    return {"prefill": decode(prompt, pair, **weights), "decode": decode(token, pair, **weights)}


def plain(**inputs):
    return generate(Plain, **inputs)


def quantised(**inputs):
    return generate(Quantised, **inputs)


TOKENS = {"dtype": torch.int64, "low": 0, "high": WORDS}
COLUMNS = gg.Input((HIDDEN, HEADS * HEAD), Shard(1))
ARGS = {
    "mesh": {"tp": 2},
    "inputs": {
        "prompt": gg.Input((BATCH, PROMPT), **TOKENS),
        "token": gg.Input((BATCH, 1), **TOKENS),
        "table": gg.Input((WORDS, HIDDEN)),
        "wq": COLUMNS,
        "wk": COLUMNS,
        "wv": COLUMNS,
        "wo": gg.Input((HEADS * HEAD, HIDDEN), Shard(0)),
        "head": gg.Input((HIDDEN, WORDS), Shard(1)),
    },
    "outputs": {"prefill": Replicate(), "decode": Replicate()},
}


@gg.check
def cache_of_own_heads():
    return gg.verify(plain, plain, **ARGS)


@gg.check
def quantised_cache():
    return gg.verify(quantised, quantised, **ARGS)
