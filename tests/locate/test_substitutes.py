"""Near operations that are tried where nothing else explains a wrong output: the one that makes all outputs right is named."""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

INPUTS = {"s": gg.Input((4, 8), Shard(1)), "v": gg.Input((8, 3), Shard(0))}


def sequential(s, v):
    return torch.softmax(s, -1) @ v


def split(weights):
    """Keys on two ranks: each has weights that the sequential program does not have."""

    def distributed(s, v):
        highest = s.amax(-1, keepdim=True)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        powers = weights(s, highest)
        total, out = powers.sum(-1, keepdim=True), powers @ v
        dist.all_reduce(total)
        dist.all_reduce(out)
        return out / total

    return distributed


def shifted(s, highest):
    return (s - highest).exp()


def multiplied(s, highest):
    return (s * highest).exp()


def reported(weights):
    return gg.verify(sequential, split(weights), mesh={"tp": 2}, inputs=INPUTS, outputs={"out": Replicate()})


def test_the_program_without_a_fault_is_proved():
    assert reported(shifted).verdict == "verified"


def test_another_operator_is_named():
    report = reported(multiplied)
    first = report.findings[0]
    assert report.verdict == "refuted"
    assert first.distributed.line == multiplied.__code__.co_firstlineno + 1
    assert first.message == "out: it would be right with add in place of mul"  # as would be with sub: shifts cancel
    assert first.repair is None  # it was not proved
