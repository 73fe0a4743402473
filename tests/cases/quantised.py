"""Keys and values kept as small integers: rounding is a function of a value and its scale; both must be the sequential ones."""

import functools
import math

import torch
import torch.distributed as dist

from cases.case import Case, faulty
from graphguard import Input, Shard

BATCH, TOKENS, FEATURES, HEADS, HEAD = 2, 3, 6, 8, 2
LARGEST = 7


def split_heads(x):
    return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)


def quantised(x, scale):
    return (x / scale).round().clamp(-LARGEST - 1, LARGEST).to(torch.int8)


def attend(q, k, v):
    return ((q @ k.transpose(-1, -2) / math.sqrt(HEAD)).softmax(-1) @ v).transpose(1, 2).flatten(2)


# ---------------------------------------------------------------------- scales
def by_token(x):
    return x.abs().amax(-1, keepdim=True) / LARGEST


def by_tensor(x):
    return x.abs().amax() / LARGEST


def by_tensor_of_all(x):
    largest = x.abs().amax()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest / LARGEST


def by_range(x):
    low, high = torch.aminmax(x)
    return (high - low) / (2 * LARGEST + 1)


def by_range_of_all(x):
    low, high = torch.aminmax(x)
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return (high - low) / (2 * LARGEST + 1)


def by_range_of_largest(x):
    low, high = torch.aminmax(x)
    dist.all_reduce(low, op=dist.ReduceOp.MAX)  # fault: the largest of the smallest
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return (high - low) / (2 * LARGEST + 1)


def by_own_part(x):
    return x.abs().amax() / LARGEST  # fault: the largest of this rank's heads


def by_sum_of_largest(x):
    largest = x.abs().amax()
    dist.all_reduce(largest)  # fault: the largest are added up
    return largest / LARGEST


def attention(x, wq, wk, wv, wo, scale_of):
    """The cache holds integers and scales; they are put together again where they are read."""
    q, k, v = (split_heads(x @ w) for w in (wq, wk, wv))
    cache = [(quantised(t, scale), scale) for t, scale in ((k, scale_of(k)), (v, scale_of(v)))]
    k, v = (held.to(x.dtype) * scale for held, scale in cache)
    return attend(q, k, v) @ wo, cache[0][0]


def attention_tp(x, wq, wk, wv, wo, scale_of):
    y, held = attention(x, wq, wk, wv, wo, scale_of)
    dist.all_reduce(y)
    return y, held


def rounded_in_between(x, wq, wk, wv, wo):
    """Keys are divided before they are rounded, and multiplied behind it: what is rounded is no longer the sequential value."""
    q, k, v = (split_heads(x @ w) for w in (wq, wk, wv))
    scale = by_token(k)
    held = quantised(k / 4, scale) * 4  # fault: a quarter of a key is rounded
    y = attend(q, held.to(x.dtype) * scale, quantised(v, by_token(v)).to(x.dtype) * by_token(v)) @ wo
    dist.all_reduce(y)
    return y, held


# ---------------------------------------------------------------------- cases
def case_of(name, tp, sequential, distributed):
    columns = Input((FEATURES, HEADS * HEAD), {"tp": Shard(1)})
    inputs = {"x": Input((BATCH, TOKENS, FEATURES)), "wq": columns, "wk": columns, "wv": columns}
    inputs |= {"wo": Input((HEADS * HEAD, FEATURES), {"tp": Shard(0)})}
    program = functools.partial(attention_tp, scale_of=distributed)
    relation = {"0": {}, "1": {"tp": Shard(1)}}
    whole = functools.partial(attention, scale_of=sequential)
    return Case(f"quantised-{name}-tp{tp}", whole, program, {"tp": tp}, inputs, relation)


def fault(name, case, program, text):
    program = functools.partial(attention_tp, scale_of=program) if program is not rounded_in_between else program
    return faulty(case, f"quantised-fault-{name}", program, text, stated=("*",))


CASES = [
    *[case_of(*each) for tp in (2, 4, 8) for each in (
        ("by-token", tp, by_token, by_token),
        ("by-tensor", tp, by_tensor, by_tensor_of_all),
    )],
    case_of("by-range", 2, by_range, by_range_of_all),
    fault("largest-of-smallest", case_of("", 2, by_range, None), by_range_of_largest, "the largest of the smallest"),
    fault("own-largest", case_of("", 2, by_tensor, None), by_own_part, "the largest of this rank's heads"),
    fault("largest-added", case_of("", 2, by_tensor, None), by_sum_of_largest, "the largest are added up"),
    fault("quarter", case_of("", 2, by_token, None), rounded_in_between, "a quarter of a key is rounded"),
]  # fmt: skip
