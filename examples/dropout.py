"""Dropout: a region that all ranks compute must draw one mask, a region that is split must draw one for each part.

A proof is for any random numbers. It needs to know which draws stand for each other: ranks that draw from generators in
one state have equal numbers, ranks that draw from different ones have their own. The report lists what was taken for what.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

BATCH, HIDDEN, WIDTH = 4, 6, 8


def mlp(x, up, down):
    hidden = F.dropout(torch.relu(F.dropout(x, 0.1) @ up), 0.25)
    return hidden @ down


def tp_mlp(x, up, down):
    x = F.dropout(x, 0.1)  # on whole inputs: the same stream on every rank
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + dist.get_rank())  # on a rank's own columns: a stream of its own
        hidden = F.dropout(torch.relu(x @ up), 0.25)
    y = hidden @ down
    dist.all_reduce(y)
    return y


def tp_mlp_one_stream(x, up, down):
    hidden = F.dropout(torch.relu(F.dropout(x, 0.1) @ up), 0.25)  # the same columns are dropped on every rank
    y = hidden @ down
    dist.all_reduce(y)
    return y


ARGS = {
    "mesh": {"tp": 2},
    "inputs": {
        "x": gg.Input((BATCH, HIDDEN)),
        "up": gg.Input((HIDDEN, WIDTH), Shard(1)),
        "down": gg.Input((WIDTH, HIDDEN), Shard(0)),
    },
    "outputs": {"out": Replicate()},
}


@gg.check
def streams_of_their_own():
    return gg.verify(mlp, tp_mlp, **ARGS)


@gg.check(expect="unproven")  # no execution can show it: the finding says that parts have the same random numbers
def one_stream():
    return gg.verify(mlp, tp_mlp_one_stream, **ARGS)
