"""Layers of hybrids with linear attention: causal depthwise convolutions, and delta rules in chunks, with heads split."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.leaves import gradients, leaves
from graphguard import Input, Shard

BATCH, CHANNELS, LENGTH, TAPS = 2, 8, 6, 3
HEADS, CHUNK, WIDTH = 4, 3, 2


# ---------------------------------------------------------------------- causal convolutions of single channels
def causal(x, weight, bias, groups):
    return F.silu(F.conv1d(x, weight, bias, padding=TAPS - 1, groups=groups)[..., : x.size(-1)])


def mixed(x, weight, bias, out, dy):
    p = leaves({"weight": weight, "bias": bias, "out": out})
    y = p["out"] @ causal(x, p["weight"], p["bias"], p["weight"].size(0))
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def mixed_by_channels(x, weight, bias, out, dy):
    p = leaves({"weight": weight, "bias": bias, "out": out})
    y = Summed.apply(p["out"] @ causal(x, p["weight"], p["bias"], p["weight"].size(0)))
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def later_taps(x, weight, bias, out, dy):
    p = leaves({"weight": weight, "bias": bias, "out": out})
    wide = F.conv1d(x, p["weight"], p["bias"], padding=TAPS - 1, groups=weight.size(0))
    y = Summed.apply(p["out"] @ F.silu(wide[..., 1 : x.size(-1) + 1]))  # fault: each place sees the next one
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


# ---------------------------------------------------------------------- delta rule, one chunk
def chunk(k, v, beta, upper=False):
    """What is new in the values of each place, given those before it in the chunk."""
    seen = torch.tril(k @ k.transpose(-1, -2), -1) * beta.unsqueeze(-1)
    system = seen + torch.eye(CHUNK)
    return torch.linalg.solve_triangular(system, v * beta.unsqueeze(-1), upper=upper, unitriangular=True)


def delta(k, v, beta, dy):
    p = leaves({"k": k, "v": v, "beta": beta})
    y = chunk(**p)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def other_triangle(k, v, beta, dy):
    p = leaves({"k": k, "v": v, "beta": beta})
    y = chunk(**p, upper=True)  # fault: the triangle that is zero
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


# ---------------------------------------------------------------------- cases
def convolved(name, program, size):
    inputs = {
        "x": Input((BATCH, CHANNELS, LENGTH), Shard(1)),
        "weight": Input((CHANNELS, 1, TAPS), Shard(0)),
        "bias": Input((CHANNELS,), Shard(0)),
        "out": Input((WIDTH, CHANNELS), Shard(1)),
        "dy": Input((BATCH, WIDTH, LENGTH)),
    }
    split = {"grads.weight": {"tp": Shard(0)}, "grads.bias": {"tp": Shard(0)}, "grads.out": {"tp": Shard(1)}}
    return Case(f"recurrent-{name}-{size}", mixed, program, {"tp": size}, inputs, {"y": {}, **split})


def by_heads(name, program, size):
    shape = (BATCH, HEADS, CHUNK)
    inputs = {key: Input((*shape, WIDTH), Shard(1)) for key in ("k", "v", "dy")} | {"beta": Input(shape, Shard(1))}
    relation = {key: {"tp": Shard(1)} for key in ("y", "grads.k", "grads.v", "grads.beta")}
    return Case(f"recurrent-{name}-{size}", delta, program, {"tp": size}, inputs, relation)


CASES = [
    *(convolved("convolution", mixed_by_channels, size) for size in (2, 4, 8)),
    *(by_heads("delta", delta, size) for size in (2, 4)),
    faulty(convolved("", None, 2), "recurrent-fault-taps", later_taps, "each place sees the next one"),
    faulty(by_heads("", None, 2), "recurrent-fault-triangle", other_triangle, "the triangle that is zero", stated=("*",)),
]
