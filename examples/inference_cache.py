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


def summed(x):
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def gathered(logits):
    if not dist.is_initialized():
        return logits
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits)
    return torch.cat(parts, -1)


def seen_keys(queries, keys):
    return torch.arange(keys) <= torch.arange(keys - queries, keys)[:, None]


def with_residual(x, out):
    return x + summed(out)


def decode(tokens, cache, table, wq, wk, wv, wo, head, seen=seen_keys, leave=with_residual):
    """One call of the model: what is new attends to itself and to what the cache has."""
    x = table[tokens]
    q, k, v = ((x @ w).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (wq, wk, wv))
    k, v = cache[0].add(k), cache[1].add(v)
    scores = (q @ k.mT / math.sqrt(HEAD)).masked_fill(~seen(q.size(2), k.size(2)), -math.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ wo
    return gathered(leave(x, out) @ head)


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


# ---------------------------------------------------------------------- and what goes wrong
class Overwriting(Plain):
    def add(self, new):
        # fault: new_token_takes_the_first_place
        self.held = new if self.held is None else torch.cat([new, self.held[:, :, 1:]], 2)
        return self.held


class OneScale(Plain):
    """One scale for all heads of a token, where a rank sees its own heads only."""

    def add(self, new):
        # fault: scale_of_own_heads
        scale = new.abs().amax((1, 3), keepdim=True) / 127
        return super().add((new / scale).round() * scale)


def seen_from_zero(queries, keys):
    # fault: new_token_sees_the_first_key_alone
    return torch.arange(keys) <= torch.arange(queries)[:, None]


def residual_on_every_rank(x, out):
    # fault: residual_counts_once_per_rank
    return summed(x + out)


def never_summed(x, out):
    # fault: heads_of_one_rank
    return x + out


def one_scale(**inputs):
    return generate(OneScale, **inputs)


def overwriting(**inputs):
    return generate(Overwriting, **inputs)


def masked_from_zero(**inputs):
    return generate(Plain, seen=seen_from_zero, **inputs)


def residual_twice(**inputs):
    return generate(Plain, leave=residual_on_every_rank, **inputs)


def unsummed(**inputs):
    return generate(Plain, leave=never_summed, **inputs)


@gg.check(expect="refuted")
def new_token_takes_the_first_place():
    return gg.verify(plain, overwriting, **ARGS)


@gg.check(expect="refuted")
def scale_of_own_heads():
    return gg.verify(one_scale, one_scale, **ARGS)


@gg.check(expect="refuted")
def new_token_sees_the_first_key_alone():
    return gg.verify(plain, masked_from_zero, **ARGS)


@gg.check(expect="refuted")
def residual_counts_once_per_rank():
    return gg.verify(plain, residual_twice, **ARGS)


@gg.check(expect="refuted")
def heads_of_one_rank():
    return gg.verify(plain, unsummed, **ARGS)
