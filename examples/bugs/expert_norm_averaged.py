"""deepspeedai/DeepSpeed #8475: the norm of expert gradients is averaged over ranks that own different experts.

Squares of different experts add up. Averaging the squared norm over the expert-parallel group makes it smaller, and
everything is clipped too little.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, EXPERTS, MAX_NORM = 6, 3, 4, 1.0
BUG_LINE = "total = total / dist.get_world_size()"


def sequential(x, dy, dense, experts):
    dense.requires_grad_(), experts.requires_grad_()
    torch.einsum("th,ehk->tk", torch.tanh(x @ dense), experts).backward(dy)
    torch.nn.utils.clip_grad_norm_([dense, experts], MAX_NORM)
    return {"dense": dense.grad, "experts": experts.grad}


def ep_gradients(x, dy, dense, experts):
    dense.requires_grad_(), experts.requires_grad_()
    torch.einsum("th,ehk->tk", torch.tanh(x @ dense), experts).backward(dy)
    dist.all_reduce(dense.grad)
    return dense.grad, experts.grad


def clipped(dense, experts, norm):
    scale = torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0)
    return {"dense": dense * scale, "experts": experts * scale}


def ep_fixed(x, dy, dense, experts):
    dense, experts = ep_gradients(x, dy, dense, experts)
    total = torch.linalg.vector_norm(experts) ** 2
    dist.all_reduce(total)
    return clipped(dense, experts, torch.sqrt(total + torch.linalg.vector_norm(dense) ** 2))


def ep_buggy(x, dy, dense, experts):
    dense, experts = ep_gradients(x, dy, dense, experts)
    total = torch.linalg.vector_norm(experts) ** 2
    dist.all_reduce(total)
    total = total / dist.get_world_size()
    return clipped(dense, experts, torch.sqrt(total + torch.linalg.vector_norm(dense) ** 2))


ARGS = {
    "mesh": {"ep": 2},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN)),
        "dy": gg.Input((TOKENS, HIDDEN)),
        "dense": gg.Input((HIDDEN, HIDDEN)),
        "experts": gg.Input((EXPERTS, HIDDEN, HIDDEN), Shard(0)),
    },
    "outputs": {"dense": Replicate(), "experts": Shard(0)},
}


@gg.check
def fixed():
    return gg.verify(sequential, ep_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, ep_buggy, **ARGS)
