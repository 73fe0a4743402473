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


# ---------------------------------------------------------------------- a generator that counts
def counted(x, seed, site, first=0):
    """What is dropped is a function of the seed, of the place in the program and of the element's number."""
    number = first + torch.arange(x.numel()).view_as(x)
    uniform = torch.sin(seed + 100 * site + number) * 43758.5453
    return x * (uniform - uniform.floor() >= 0.25) / 0.75


def two_sites(x, y, seed):
    """On all tokens, and then on all of a table that every rank has."""
    return counted(x, seed, 0) @ counted(y, seed, 1)


def own_tokens(x, y, seed):
    first = dist.get_rank() * x.numel()
    return counted(x, seed, 0, first) @ counted(y, seed, 1)


def every_rank_from_zero(x, y, seed):
    # fault: parts_drop_alike
    return counted(x, seed, 0) @ counted(y, seed, 1)


def numbers_of_rows(x, y, seed):
    first = dist.get_rank() * x.size(0)
    # fault: first_element_by_rows
    return counted(x, seed, 0, first) @ counted(y, seed, 1)


def copies_of_their_own(x, y, seed):
    first = dist.get_rank() * x.numel()
    # fault: copies_drop_differently
    return counted(x, seed, 0, first) @ counted(y, seed + dist.get_rank(), 1)


def one_site(x, y, seed):
    first = dist.get_rank() * x.numel()
    # fault: both_places_drop_alike
    return counted(x, seed, 0, first) @ counted(y, seed, 0)


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


COUNTED = {
    "mesh": {"tp": 2},
    "inputs": {"x": gg.Input((BATCH, HIDDEN), Shard(0)), "y": gg.Input((HIDDEN, WIDTH)), "seed": gg.Input(())},
    "outputs": {"out": Shard(0)},
}


@gg.check
def counting():
    return gg.verify(two_sites, own_tokens, **COUNTED)


@gg.check(expect="refuted")
def parts_drop_alike():
    return gg.verify(two_sites, every_rank_from_zero, **COUNTED)


@gg.check(expect="refuted")
def first_element_by_rows():
    return gg.verify(two_sites, numbers_of_rows, **COUNTED)


@gg.check(expect="refuted")
def copies_drop_differently():
    return gg.verify(two_sites, copies_of_their_own, **COUNTED)


@gg.check(expect="refuted")
def both_places_drop_alike():
    return gg.verify(two_sites, one_site, **COUNTED)
