"""TrainVerify (SOSP '25): an all_reduce stands where an all_gather is due.

Queries stay where they are, keys and values of all ranks are needed. Summed instead of gathered they are fewer, and each
is a mix of tokens of different ranks; attention takes any number of keys.
"""

import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

TOKENS, HIDDEN, HEAD = 6, 4, 3
BUG_LINE = 'k, v = (funcol.all_reduce(t, "sum", dist.group.WORLD) for t in (x @ wk, x @ wv))'


def sequential(x, wq, wk, wv):
    return F.scaled_dot_product_attention(x @ wq, x @ wk, x @ wv)


def cp_fixed(x, wq, wk, wv):
    k, v = (funcol.all_gather_tensor(t, 0, dist.group.WORLD) for t in (x @ wk, x @ wv))
    return F.scaled_dot_product_attention(x @ wq, k, v)


def cp_buggy(x, wq, wk, wv):
    k, v = (funcol.all_reduce(t, "sum", dist.group.WORLD) for t in (x @ wk, x @ wv))
    return F.scaled_dot_product_attention(x @ wq, k, v)


MATRIX = gg.Input((HIDDEN, HEAD))
ARGS = {"mesh": {"cp": 2}, "inputs": {"x": gg.Input((TOKENS, HIDDEN), Shard(0)), "wq": MATRIX, "wk": MATRIX, "wv": MATRIX}}


@gg.check
def fixed():
    return gg.verify(sequential, cp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, cp_buggy, **ARGS)
