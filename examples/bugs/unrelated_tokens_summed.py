"""vllm-project/tpu-inference #2248: a sum over all ranks adds tokens that have nothing to do with each other.

Requests are split over one axis of the mesh, the width of the experts over the other. The partial outputs are to be
summed over the second axis; the sum over both adds up different tokens that happen to stand at the same offset.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

TOKENS, HIDDEN, WIDTH, EXPERTS = 6, 4, 6, 2
BUG_LINE = "dist.all_reduce(y)"


def experts_of(x, gate, up, down):
    scores = F.softmax(x @ gate, dim=-1)
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        y += scores[:, e, None] * (F.gelu(x @ up[e]) @ down[e])
    return y


def tp_fixed(x, gate, up, down, mesh):
    y = experts_of(x, gate, up, down)
    dist.all_reduce(y, group=mesh.get_group("tp"))
    return x + y


def tp_buggy(x, gate, up, down):
    y = experts_of(x, gate, up, down)
    dist.all_reduce(y)
    return x + y


def sequential(x, gate, up, down):
    return x + experts_of(x, gate, up, down)


ARGS = {
    "mesh": {"attn_dp": 2, "tp": 2},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN), {"attn_dp": Shard(0)}),
        "gate": gg.Input((HIDDEN, EXPERTS)),
        "up": gg.Input((EXPERTS, HIDDEN, WIDTH), {"tp": Shard(2)}),
        "down": gg.Input((EXPERTS, WIDTH, HIDDEN), {"tp": Shard(1)}),
    },
}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, **ARGS)
