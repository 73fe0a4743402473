"""TrainVerify (SOSP '25): an all_reduce is left out, and its consumer reads a buffer that nothing was written to.

The partial products are copied into a communication buffer, in two pieces that are summed one by one. The second piece
was forgotten: what is read there is whatever the memory held.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

TOKENS, HIDDEN, WIDTH = 4, 3, 6
BUG_LINE = "summed_in_pieces(partial, buffer, pieces=range(1))"


def sequential(x, up, down):
    return torch.relu(torch.relu(x @ up) @ down)


def summed_in_pieces(partial, buffer, pieces):
    for piece in pieces:
        buffer.chunk(2)[piece].copy_(partial.chunk(2)[piece])
        dist.all_reduce(buffer.chunk(2)[piece])


def tp_fixed(x, up, down):
    partial = torch.relu(x @ up) @ down
    buffer = torch.empty_like(partial)
    summed_in_pieces(partial, buffer, pieces=range(2))
    return torch.relu(buffer)


def tp_buggy(x, up, down):
    partial = torch.relu(x @ up) @ down
    buffer = torch.empty_like(partial)
    summed_in_pieces(partial, buffer, pieces=range(1))
    return torch.relu(buffer)


INPUTS = {
    "x": gg.Input((TOKENS, HIDDEN)),
    "up": gg.Input((HIDDEN, WIDTH), Shard(1)),
    "down": gg.Input((WIDTH, HIDDEN), Shard(0)),
}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, mesh={"tp": 2}, inputs=INPUTS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, mesh={"tp": 2}, inputs=INPUTS)
