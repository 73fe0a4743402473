"""sgl-project/SpecForge #663, pytorch/xla #4796: each rank clips its shard of the gradients by the norm of that shard.

`clip_grad_norm_` of torch sees the tensors that it is given. On shards it computes another norm on every rank, and each
shard is scaled by its own.
"""

import torch
import torch.distributed as dist

import graphguard as gg

BATCH, HIDDEN, MAX_NORM, RATE = 8, 4, 0.05, 0.1
BUG_LINE = "torch.nn.utils.clip_grad_norm_([own], MAX_NORM)"


def sequential(x, w):
    w.requires_grad_()
    optimizer = torch.optim.SGD([w], lr=RATE, momentum=0.9)
    for part in x.chunk(2):
        optimizer.zero_grad()
        torch.tanh(part @ w).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_([w], MAX_NORM)
        optimizer.step()
    return w.detach()


def gradient_shard(part, w):
    """Of the mean over all ranks' examples."""
    part = part.chunk(dist.get_world_size())[dist.get_rank()]
    torch.tanh(part @ w).pow(2).mean().backward()
    grad = w.new_empty(len(w) // dist.get_world_size(), HIDDEN)
    dist.reduce_scatter_tensor(grad, w.grad)
    w.grad = None
    return grad / dist.get_world_size()


def clip_by_global_norm(own):
    squares = own.grad.pow(2).sum()
    dist.all_reduce(squares)
    own.grad.mul_(torch.clamp(MAX_NORM / (squares.sqrt() + 1e-6), max=1.0))


def clip_by_own_norm(own):
    torch.nn.utils.clip_grad_norm_([own], MAX_NORM)


def zero_training(x, w, clip):
    own = w.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
    optimizer = torch.optim.SGD([own], lr=RATE, momentum=0.9)
    for part in x.chunk(2):
        own.grad = gradient_shard(part, w.requires_grad_())
        clip(own)
        optimizer.step()
        w = torch.empty_like(w)
        dist.all_gather_into_tensor(w, own.detach())
    return w


def zero_fixed(x, w):
    return zero_training(x, w, clip_by_global_norm)


def zero_buggy(x, w):
    return zero_training(x, w, clip_by_own_norm)


ARGS = {"mesh": {"dp": 2}, "inputs": {"x": gg.Input((BATCH, HIDDEN)), "w": gg.Input((HIDDEN, HIDDEN))}}


@gg.check
def fixed():
    return gg.verify(sequential, zero_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, zero_buggy, **ARGS)
