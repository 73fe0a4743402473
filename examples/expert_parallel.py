"""Expert parallelism: one expert per rank, tokens travel to their expert and back by all-to-all.

Token t goes to expert t modulo the number of experts (a hash layer), so each rank sends as much as it receives.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

TOKENS, HIDDEN, WIDTH, EXPERTS = 16, 4, 6, 4


def expert(x, up, down):
    return F.gelu(x @ up) @ down


def moe(x, up, down):
    slots = x.view(-1, EXPERTS, HIDDEN)
    return torch.stack([expert(slots[:, e], up[e], down[e]) for e in range(EXPERTS)], 1).view(TOKENS, HIDDEN)


def exchanged(x):
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


def ep_moe(x, up, down):
    slots = x.view(-1, EXPERTS, HIDDEN).transpose(0, 1).contiguous()  # one slot per rank
    mine = exchanged(slots)  # my expert's tokens, by the rank that they come from
    back = exchanged(expert(mine, up[0], down[0]))
    return back.transpose(0, 1).reshape(x.shape)


@gg.check
def hash_layer():
    return gg.verify(
        moe,
        ep_moe,
        mesh={"ep": EXPERTS},
        inputs={
            "x": gg.Input((TOKENS, HIDDEN), Shard(0)),
            "up": gg.Input((EXPERTS, HIDDEN, WIDTH), Shard(0)),
            "down": gg.Input((EXPERTS, WIDTH, HIDDEN), Shard(0)),
        },
        outputs={"out": Shard(0)},
    )
