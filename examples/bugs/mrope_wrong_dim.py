"""NVIDIA/Megatron-LM #1612: the table of multimodal rotary positions is cut along the batch instead of the sequence.

Under context parallelism each rank takes its part of the table. It lies (sequence, batch, head), and was cut as if the
sequence came second; the rotation then reads as many rows as it has tokens, from the top.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

SEQUENCE, BATCH, HEAD = 4, 2, 6
BUG_LINE = "table = rotary_table(position_ids).chunk(dist.get_world_size(), dim=1)[dist.get_rank()]"


def rotary_table(position_ids):
    """Angles (sequence, batch, head): time, height and width have a third of the frequencies each."""
    inverse = 100.0 ** (-torch.arange(HEAD // 2) / 3)
    angles = (position_ids[..., None] * inverse).split(1, dim=-1)
    angles = torch.cat([part[which] for which, part in enumerate(angles)], dim=-1)
    return torch.cat([angles, angles], dim=-1)


def rotate(x, table):
    table = table[: x.size(0)]
    left, right = x.chunk(2, dim=-1)
    return x * table.cos() + torch.cat([-right, left], dim=-1) * table.sin()


def attention(q, k, v):
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(0, 1)


def sequential(q, k, v, position_ids):
    table = rotary_table(position_ids)
    return attention(rotate(q, table), rotate(k, table), v)


def gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def cp_fixed(q, k, v, position_ids):
    table = rotary_table(position_ids).chunk(dist.get_world_size(), dim=0)[dist.get_rank()]
    return attention(rotate(q, table), gather(rotate(k, table)), gather(v))


def cp_buggy(q, k, v, position_ids):
    table = rotary_table(position_ids).chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
    return attention(rotate(q, table), gather(rotate(k, table)), gather(v))


TOKENS = gg.Input((SEQUENCE, BATCH, HEAD), Shard(0))
IDS = gg.Input((3, SEQUENCE, BATCH), dtype=torch.int64, low=0, high=16)
ARGS = {"mesh": {"cp": 2}, "inputs": {"q": TOKENS, "k": TOKENS, "v": TOKENS, "position_ids": IDS}}


@gg.check
def fixed():
    return gg.verify(sequential, cp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, cp_buggy, **ARGS)
