"""Inference: a prompt fills the cache of keys and values, one more token is decoded, and the logits are returned."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.regions import gather_last
from graphguard import Input, Shard

BATCH, PROMPT, FEATURES, HEAD, VOCABULARY = 2, 3, 6, 2, 8
SCALE = 1 / math.sqrt(HEAD)


def split_heads(x):
    return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)


def merged(x):
    return x.transpose(1, 2).flatten(2)


def rotary(x, positions):
    rates = 10.0 ** -torch.arange(HEAD // 2, dtype=torch.float32)
    angles = positions[:, None] * rates
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def attend(q, k, v, mask=None):
    repeat = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = q @ k.transpose(-1, -2) * SCALE
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v


def causal(queries, keys):
    return queries[:, None] >= keys


# ---------------------------------------------------------------------- one layer and its cache
class Layer:
    """Attention and an MLP; `total` makes a sum over the tensor ranks of what is a part on each."""

    def __init__(self, weights, positions=rotary):
        self.weights, self.rotary = weights, positions
        self.k = self.v = None

    def total(self, x):
        return x

    def keep(self, k, v):
        self.k = k if self.k is None else torch.cat([self.k, k], 2)
        self.v = v if self.v is None else torch.cat([self.v, v], 2)

    def __call__(self, x, start):
        w = self.weights
        positions = start + torch.arange(x.size(1))
        q, k, v = (split_heads(x @ w[name]) for name in ("wq", "wk", "wv"))
        self.keep(self.rotary(k, positions), v)
        seen = causal(positions, torch.arange(self.k.size(2)))
        x = x + self.total(merged(attend(self.rotary(q, positions), self.k, self.v, seen)) @ w["wo"])
        return x + self.total(F.silu(x @ w["up"]) @ w["down"])


class SplitLayer(Layer):
    def total(self, x):
        dist.all_reduce(x)
        return x


class PreallocatedLayer(SplitLayer):
    """The cache is as long as it will ever be, and is written in place."""

    length = PROMPT + 1

    def keep(self, k, v):
        if self.k is None:
            shape = (*k.shape[:2], self.length, HEAD)
            self.whole_k, self.whole_v, self.used = k.new_zeros(shape), v.new_zeros(shape), 0
        end = self.used + k.size(2)
        self.whole_k[:, :, self.used : end], self.whole_v[:, :, self.used : end] = k, v
        self.k, self.v, self.used = self.whole_k[:, :, :end], self.whole_v[:, :, :end], end


class StaticLayer(SplitLayer):
    """The cache is written by index, and all of it is attended under a mask."""

    length = PROMPT + 2

    def keep(self, k, v):
        if self.k is None:
            shape = (*k.shape[:2], self.length, HEAD)
            self.k, self.v, self.used = k.new_zeros(shape), v.new_zeros(shape), 0
        places = torch.arange(self.used, self.used + k.size(2))
        self.k, self.v = self.k.index_copy(2, places, k), self.v.index_copy(2, places, v)
        self.used += k.size(2)


def whole_logits(x, head):
    return x @ head


def gathered_logits(x, head):
    return gather_last(x @ head, None)


def generated(layer, logits, cache=True):
    """The logits of the prompt's last token, those of one more token, and the cache that is left."""

    def program(prompt, token, table, head, **weights):
        block = layer(weights)
        first = logits(block(F.embedding(prompt, table), 0)[:, -1:], head)
        second = logits(block(F.embedding(token, table), prompt.size(1)), head)
        out = {"prefill": first, "decode": second}
        return out | {"k": block.k[:, :, : PROMPT + 1], "v": block.v[:, :, : PROMPT + 1]} if cache else out

    return program


# ---------------------------------------------------------------------- a decode step with a cache that is given
def decoded(q, k, v, cached_k, cached_v):
    """q, k, v of one token: [batch, heads, 1, head]; the cache: [batch, heads, sequence, head]."""
    return attend(q, torch.cat([cached_k, k], 2), torch.cat([cached_v, v], 2))


def decoded_over_sequence(q, k, v, cached_k, cached_v):
    """The cache is split by positions, the new token is on the last rank: parts of the softmax are put together."""
    if dist.get_rank() == dist.get_world_size() - 1:
        cached_k, cached_v = torch.cat([cached_k, k], 2), torch.cat([cached_v, v], 2)
    return combined(q @ cached_k.transpose(-1, -2) * SCALE, cached_v)


def combined(scores, values):
    largest = scores.amax(-1, keepdim=True)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    weights = (scores - largest).exp()
    total, out = weights.sum(-1, keepdim=True), weights @ values
    dist.all_reduce(total)
    dist.all_reduce(out)
    return out / total


def decoded_by_log(q, k, v, cached_k, cached_v):
    """Each rank attends to its part, and says how much its part weighs."""
    if dist.get_rank() == dist.get_world_size() - 1:
        cached_k, cached_v = torch.cat([cached_k, k], 2), torch.cat([cached_v, v], 2)
    scores = q @ cached_k.transpose(-1, -2) * SCALE
    out, log = scores.softmax(-1) @ cached_v, scores.logsumexp(-1, keepdim=True)
    outs, logs = ([torch.empty_like(x) for _ in range(dist.get_world_size())] for x in (out, log))
    dist.all_gather(outs, out)
    dist.all_gather(logs, log)
    share = torch.stack(logs).softmax(0)
    return (share * torch.stack(outs)).sum(0)


def whole_cache(q, k, v, cached_k, cached_v):
    return attend(q, cached_k, cached_v)


def decoded_over_whole_cache(q, k, v, cached_k, cached_v):
    return combined(q @ cached_k.transpose(-1, -2) * SCALE, cached_v)


# ---------------------------------------------------------------------- faults
class LaggingLayer(SplitLayer):
    def __call__(self, x, start):
        return super().__call__(x, start - (start > 0))  # fault: the new token has the position of the one before


class ForgetfulLayer(SplitLayer):
    def keep(self, k, v):
        super().keep(k, v)
        if k.size(2) == 1:
            self.v = torch.cat([v, self.v[:, :, 1:]], 2)  # fault: the first value of the cache is lost


class OverwritingLayer(PreallocatedLayer):
    def keep(self, k, v):
        if k.size(2) == 1:
            self.used -= 1  # fault: the new token takes the place of the one before
        super().keep(k, v)
        self.k, self.v = (self.whole_k, self.whole_v) if k.size(2) == 1 else (self.k, self.v)


class TwiceRotatedLayer(SplitLayer):
    def keep(self, k, v):
        if self.k is not None:
            self.k = self.rotary(self.k, torch.ones(1))  # fault: the cache is rotated again
        super().keep(k, v)


class HalfReducedLayer(SplitLayer):
    def total(self, x):
        if x.size(1) > 1:
            dist.all_reduce(x)
        return x  # fault: the decode step is not reduced


class MeanLayer(SplitLayer):
    def total(self, x):
        dist.all_reduce(x, op=dist.ReduceOp.AVG)  # fault: parts are averaged
        return x


def logits_backwards(x, head):
    part = x @ head
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return torch.cat(parts[::-1], -1)  # fault: the vocabulary is put together backwards


def combined_with_own_largest(q, k, v, cached_k, cached_v):
    scores = q @ cached_k.transpose(-1, -2) * SCALE
    weights = (scores - scores.amax(-1, keepdim=True)).exp()  # fault: each rank has a shift of its own
    total, out = weights.sum(-1, keepdim=True), weights @ cached_v
    dist.all_reduce(total)
    dist.all_reduce(out)
    return out / total


def parts_of_softmax_added(q, k, v, cached_k, cached_v):
    out = attend(q, cached_k, cached_v)
    dist.all_reduce(out, op=dist.ReduceOp.AVG)  # fault: the mean of the parts, whatever they weigh
    return out


def new_token_everywhere(q, k, v, cached_k, cached_v):
    cached_k, cached_v = torch.cat([cached_k, k], 2), torch.cat([cached_v, v], 2)
    return combined(q @ cached_k.transpose(-1, -2) * SCALE, cached_v)  # fault: the new token counts once for each rank


# ---------------------------------------------------------------------- cases
def generating(name, distributed, size, heads=8, kv_heads=8, split_vocabulary=False, cache=True):
    hidden, tokens = 8, {"dtype": torch.int64, "low": 0, "high": VOCABULARY}
    column, row = {"tp": Shard(1)}, {"tp": Shard(0)}
    kv = column if kv_heads >= size else {}
    inputs = {
        "prompt": Input((BATCH, PROMPT), **tokens),
        "token": Input((BATCH, 1), **tokens),
        "table": Input((VOCABULARY, FEATURES)),
        "head": Input((FEATURES, VOCABULARY), column if split_vocabulary else {}),
        "wq": Input((FEATURES, heads * HEAD), column),
        "wk": Input((FEATURES, kv_heads * HEAD), kv),
        "wv": Input((FEATURES, kv_heads * HEAD), kv),
        "wo": Input((heads * HEAD, FEATURES), row),
        "up": Input((FEATURES, hidden), column),
        "down": Input((hidden, FEATURES), row),
    }
    relation = {"prefill": {}, "decode": {}}
    if cache:
        held = {"tp": Shard(1)} if kv else {}
        relation |= {"k": held, "v": held}
    return Case(f"inference-{name}", generated(Layer, whole_logits, cache), distributed, {"tp": size}, inputs, relation)


def decoding(name, sequential, distributed, size):
    token = Input((BATCH, 2, 1, HEAD))
    cache = {"cp": Shard(2)}
    inputs = {
        "q": token,
        "k": Input(token.shape),
        "v": Input(token.shape),
        "cached_k": Input((BATCH, 2, 8, HEAD), cache),
        "cached_v": Input((BATCH, 2, 8, HEAD), cache),
    }
    return Case(f"inference-{name}", sequential, distributed, {"cp": size}, inputs, {"out": {}})


def correct(size):
    plain = generated(SplitLayer, whole_logits)
    return [
        generating(f"cache-{size}", plain, size),
        generating(f"cache-grouped-{size}", plain, size, kv_heads=4) if size <= 4 else None,
        generating(f"cache-one-head-{size}", plain, size, kv_heads=1),
        generating(f"cache-vocabulary-{size}", generated(SplitLayer, gathered_logits), size, split_vocabulary=True),
        generating(f"cache-in-place-{size}", generated(PreallocatedLayer, whole_logits), size),
        generating(f"cache-static-{size}", generated(StaticLayer, whole_logits), size),
        decoding(f"decode-whole-cache-{size}", whole_cache, decoded_over_whole_cache, size),
        decoding(f"decode-over-sequence-{size}", decoded, decoded_over_sequence, size),
        decoding(f"decode-by-log-{size}", decoded, decoded_by_log, size),
    ]


def faults():
    every = {"stated": ("*",)}
    two, split = generating("", None, 2), generating("", None, 2, split_vocabulary=True)
    whole, grown = decoding("", whole_cache, None, 2), decoding("", decoded, None, 2)
    seeded = [
        (two, "lagging", generated(LaggingLayer, whole_logits), "the new token has the position of the one before"),
        (two, "overwriting", generated(OverwritingLayer, whole_logits), "the new token takes the place of the one before"),
        (two, "forgetful", generated(ForgetfulLayer, whole_logits), "the first value of the cache is lost"),
        (two, "rotated-again", generated(TwiceRotatedLayer, whole_logits), "the cache is rotated again"),
        (two, "half-reduced", generated(HalfReducedLayer, whole_logits), "the decode step is not reduced"),
        (two, "averaged", generated(MeanLayer, whole_logits), "parts are averaged"),
        (split, "logits-backwards", generated(SplitLayer, logits_backwards), "the vocabulary is put together backwards"),
        (whole, "own-largest", combined_with_own_largest, "each rank has a shift of its own"),
        (whole, "parts-added", parts_of_softmax_added, "the mean of the parts, whatever they weigh"),
        (grown, "new-token-everywhere", new_token_everywhere, "the new token counts once for each rank"),
    ]
    return [faulty(case, f"inference-fault-{name}", program, fault, **every) for case, name, program, fault in seeded]


CASES = [*[case for size in (2, 4, 8) for case in correct(size) if case is not None], *faults()]
