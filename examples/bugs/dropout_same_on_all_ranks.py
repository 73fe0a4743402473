"""NVIDIA/Megatron-LM #1256, #6858, PaddlePaddle/PaddleFleetX #1005: dropout draws the same mask on every rank.

The sequence is split. Runs with dropout cannot be compared; but a generator that counts is a function of its seed and
of the position of an element. A rank that counts its own elements from zero drops what rank 0 drops.

Also: bigscience-workshop/Megatron-DeepSpeed #276.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

TOKENS, HIDDEN, DROPPED = 6, 4, 0.25
BUG_LINE = "return torch.arange(x.numel()).view_as(x)"


def dropout(x, seed, positions):
    uniform = torch.sin(seed + positions) * 43758.5453
    kept = uniform - uniform.floor() >= DROPPED
    return x * kept / (1 - DROPPED)


def sequential(x, residual, seed):
    return residual + dropout(F.gelu(x), seed, torch.arange(x.numel()).view_as(x))


def positions_in_sequence(x):
    return torch.arange(x.numel()).view_as(x) + dist.get_rank() * x.numel()


def positions_here(x):
    return torch.arange(x.numel()).view_as(x)


def sp_fixed(x, residual, seed):
    return residual + dropout(F.gelu(x), seed, positions_in_sequence(x))


def sp_buggy(x, residual, seed):
    return residual + dropout(F.gelu(x), seed, positions_here(x))


PART = gg.Input((TOKENS, HIDDEN), Shard(0))
ARGS = {"mesh": {"tp": 2}, "inputs": {"x": PART, "residual": PART, "seed": gg.Input(())}}


@gg.check
def fixed():
    return gg.verify(sequential, sp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, sp_buggy, **ARGS)
