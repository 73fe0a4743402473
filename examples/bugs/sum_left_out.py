"""TrainVerify (SOSP '25): an all_reduce is left out, and its consumer takes the operand instead.

The output projection of attention is row-parallel. The residual is added to each rank's partial product, and the norm
behind it sees something else on every rank; shapes fit, and nothing complains.
"""

import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

TOKENS, HIDDEN, HEADS, HEAD, WIDTH = 4, 4, 2, 2, 6
BUG_LINE = "h = x + attention(x @ wq, x @ wk, x @ wv) @ wo  # nobody sums"


def attention(q, k, v):
    q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(0, 1) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)


def mlp(x, up, down):
    return F.silu(F.rms_norm(x, (HIDDEN,)) @ up) @ down


def sequential(x, wq, wk, wv, wo, up, down):
    h = x + attention(x @ wq, x @ wk, x @ wv) @ wo
    return h + mlp(h, up, down)


def summed(x):
    dist.all_reduce(x)
    return x


def tp_fixed(x, wq, wk, wv, wo, up, down):
    h = x + summed(attention(x @ wq, x @ wk, x @ wv) @ wo)
    return h + summed(mlp(h, up, down))


def tp_buggy(x, wq, wk, wv, wo, up, down):
    h = x + attention(x @ wq, x @ wk, x @ wv) @ wo  # nobody sums
    return h + summed(mlp(h, up, down))


COLUMNS, ROWS = gg.Input((HIDDEN, HEADS * HEAD), Shard(1)), gg.Input((HEADS * HEAD, HIDDEN), Shard(0))
INPUTS = {"x": gg.Input((TOKENS, HIDDEN)), "wq": COLUMNS, "wk": COLUMNS, "wv": COLUMNS, "wo": ROWS}
INPUTS |= {"up": gg.Input((HIDDEN, WIDTH), Shard(1)), "down": gg.Input((WIDTH, HIDDEN), Shard(0))}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, mesh={"tp": 2}, inputs=INPUTS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, mesh={"tp": 2}, inputs=INPUTS)
