"""NVIDIA-NeMo/Automodel #3359: each microbatch adds the whole balancing loss of a router.

The main loss is summed over tokens and divided by the tokens of all microbatches. The balancing loss is a mean over one
microbatch, and is added to each of them as it is: with M microbatches it counts M times.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, EXPERTS, MICROBATCHES, WEIGHT = 8, 4, 2, 2, 0.1
BUG_LINE = "loss = main + WEIGHT * auxiliary"


def losses(x, y, gate, experts):
    """Per token, the squared error of the output, and how far the gate is from an even choice."""
    probs = torch.softmax(x @ gate, dim=-1)
    out = (probs.unsqueeze(-1) * torch.einsum("th,ehk->tek", x, experts)).sum(1)
    return (out - y).square().sum(-1), (probs - 1 / EXPERTS).square().sum(-1)


def sequential(x, y, gate, experts):
    gate.requires_grad_(), experts.requires_grad_()
    main, auxiliary = losses(x, y, gate, experts)
    loss = main.mean() + WEIGHT * auxiliary.mean()
    loss.backward()
    return {"gate": gate.grad, "experts": experts.grad}


def microbatches(x, y, gate, experts):
    gate.requires_grad_(), experts.requires_grad_()
    tokens = len(x) * dist.get_world_size()
    for part, wanted in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        main, auxiliary = losses(part, wanted, gate, experts)
        yield main.sum() * dist.get_world_size() / tokens, auxiliary.mean()


def averaged(*weights):
    flat = torch.cat([weight.grad.flatten() for weight in weights])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([weight.numel() for weight in weights])
    return {name: part.view_as(weight) for name, part, weight in zip(("gate", "experts"), parts, weights, strict=True)}


def dp_fixed(x, y, gate, experts):
    for main, auxiliary in microbatches(x, y, gate, experts):
        loss = main + WEIGHT * auxiliary / MICROBATCHES
        loss.backward()
    return averaged(gate, experts)


def dp_buggy(x, y, gate, experts):
    for main, auxiliary in microbatches(x, y, gate, experts):
        loss = main + WEIGHT * auxiliary
        loss.backward()
    return averaged(gate, experts)


ARGS = {
    "mesh": {"dp": 2},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN), Shard(0)),
        "y": gg.Input((TOKENS, HIDDEN), Shard(0)),
        "gate": gg.Input((HIDDEN, EXPERTS)),
        "experts": gg.Input((EXPERTS, HIDDEN, HIDDEN)),
    },
    "outputs": {"gate": Replicate(), "experts": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, dp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, dp_buggy, **ARGS)
