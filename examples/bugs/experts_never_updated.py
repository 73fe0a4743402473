"""NVIDIA/Megatron-LM #565: the gradients of the experts are not in the buffers that the distributed optimizer steps.

The optimizer reduces a flat buffer of gradients, steps its shard of the parameters and gathers them again. Parameters
that were not registered in the buffer keep their values for ever.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

BATCH, HIDDEN, EXPERTS, RATE, MOMENTUM = 4, 2, 3, 0.1, 0.9
BUG_LINE = 'buffered = ["dense"]  # without the experts'


def loss(x, y, dense, experts):
    h = torch.tanh(x @ dense)
    return (torch.einsum("bh,ehk->bk", h, experts) - y).pow(2).sum(-1).mean()


def sequential(x, y, dense, experts):
    parameters = {"dense": dense.requires_grad_(), "experts": experts.requires_grad_()}
    optimizer = torch.optim.SGD(parameters.values(), lr=RATE, momentum=MOMENTUM)
    for _ in range(2):
        optimizer.zero_grad()
        loss(x, y, **parameters).backward()
        optimizer.step()
    return {name: p.detach() for name, p in parameters.items()}


class DistributedOptimizer:
    """Momentum on this rank's shard of one flat buffer."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.size = sum(p.numel() for p in parameters) // dist.get_world_size()
        self.momentum = torch.zeros(self.size)

    def step(self):
        grads = torch.cat([p.grad.flatten() for p in self.parameters])
        own = grads.new_empty(self.size)
        dist.reduce_scatter_tensor(own, grads)
        self.momentum = MOMENTUM * self.momentum + own / dist.get_world_size()
        flat = torch.cat([p.detach().flatten() for p in self.parameters])
        updated = torch.empty_like(flat)
        dist.all_gather_into_tensor(updated, flat.chunk(dist.get_world_size())[dist.get_rank()] - RATE * self.momentum)
        for p, new in zip(self.parameters, updated.split([p.numel() for p in self.parameters]), strict=True):
            p.data.copy_(new.view_as(p))


def train(x, y, dense, experts, buffered):
    parameters = {"dense": dense.requires_grad_(), "experts": experts.requires_grad_()}
    optimizer = DistributedOptimizer([parameters[name] for name in buffered])
    for _ in range(2):
        for p in parameters.values():
            p.grad = None
        loss(x, y, **parameters).backward()
        optimizer.step()
    return {name: p.detach() for name, p in parameters.items()}


def zero_fixed(x, y, dense, experts):
    return train(x, y, dense, experts, ["dense", "experts"])


def zero_buggy(x, y, dense, experts):
    buffered = ["dense"]  # without the experts
    return train(x, y, dense, experts, buffered)


ROWS = gg.Input((BATCH, HIDDEN), Shard(0))
INPUTS = {"x": ROWS, "y": ROWS, "dense": gg.Input((HIDDEN, HIDDEN)), "experts": gg.Input((EXPERTS, HIDDEN, HIDDEN))}
ARGS = {"mesh": {"dp": 2}, "inputs": INPUTS, "outputs": {"dense": Replicate(), "experts": Replicate()}}


@gg.check
def fixed():
    return gg.verify(sequential, zero_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, zero_buggy, **ARGS)
