"""Published with GraphGuard (Entangle, ASPLOS '26): the padding is cut off at the wrong end.

A sequence that does not divide evenly is padded, split over the ranks, and gathered again. Padded in front but cut
behind, the result keeps the padding and loses the last tokens.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg

LENGTH, HIDDEN, WIDTH = 7, 4, 6
BUG_LINE = "return gather(y)[: x.size(0)]"


def sequential(x, up, down):
    return F.gelu(x @ up) @ down


def pad_and_split(x):
    """This rank's part of the sequence; the padding goes in front."""
    pad = -x.size(0) % dist.get_world_size()
    return pad, F.pad(x, (0, 0, pad, 0)).chunk(dist.get_world_size())[dist.get_rank()]


def gather(y):
    parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y)
    return torch.cat(parts)


def sp_fixed(x, up, down):
    pad, part = pad_and_split(x)
    y = F.gelu(part @ up) @ down
    return gather(y)[pad:]


def sp_buggy(x, up, down):
    _, part = pad_and_split(x)
    y = F.gelu(part @ up) @ down
    return gather(y)[: x.size(0)]


ARGS = {
    "mesh": {"sp": 4},
    "inputs": {"x": gg.Input((LENGTH, HIDDEN)), "up": gg.Input((HIDDEN, WIDTH)), "down": gg.Input((WIDTH, HIDDEN))},
}


@gg.check
def fixed():
    return gg.verify(sequential, sp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, sp_buggy, **ARGS)
