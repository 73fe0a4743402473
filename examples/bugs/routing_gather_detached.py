"""NVIDIA-NeMo/Automodel #2995: routing probabilities are gathered without a gradient, and the loss never reaches the router.

Each rank has one expert and sends its tokens to all: tokens and probabilities are gathered, outputs are scattered back.
The tokens go through a gather that autograd knows; the probabilities go through `dist.all_gather`, which cuts them off.
All that trains the router is its balancing loss.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, EXPERTS = 8, 4, 2
BUG_LINE = "dist.all_gather(all_probs, probs.contiguous())"


def balance(probs):
    return 0.01 * probs.pow(2).sum()


def sequential(x, target, gate, experts):
    gate.requires_grad_()
    probs = (x @ gate).softmax(-1)
    y = sum(probs[:, e, None] * torch.tanh(x @ experts[e]) for e in range(EXPERTS))
    loss = (y - target).pow(2).sum() + balance(probs)
    loss.backward()
    return {"y": y, "gate": gate.grad}


def combined(x, probs, expert):
    """This rank's expert on the tokens of all ranks; each rank keeps the sum for its own tokens."""
    y = probs[:, dist.get_rank(), None] * torch.tanh(x @ expert)
    return dist_nn.reduce_scatter(torch.empty_like(y[: TOKENS // dist.get_world_size()]), list(y.chunk(dist.get_world_size())))


def trained(y, target, probs, gate):
    loss = (y - target).pow(2).sum() + balance(probs)
    loss.backward()
    dist.all_reduce(gate.grad)
    return {"y": y, "gate": gate.grad}


def ep_fixed(x, target, gate, experts):
    gate.requires_grad_()
    probs = (x @ gate).softmax(-1)
    all_x, all_probs = dist_nn.all_gather(x), dist_nn.all_gather(probs)
    y = combined(torch.cat(all_x), torch.cat(all_probs), experts[0])
    return trained(y, target, probs, gate)


def ep_buggy(x, target, gate, experts):
    gate.requires_grad_()
    probs = (x @ gate).softmax(-1)
    all_x, all_probs = dist_nn.all_gather(x), [torch.empty_like(probs) for _ in range(EXPERTS)]
    dist.all_gather(all_probs, probs.contiguous())
    y = combined(torch.cat(all_x), torch.cat(all_probs), experts[0])
    return trained(y, target, probs, gate)


ARGS = {
    "mesh": {"ep": EXPERTS},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN), Shard(0)),
        "target": gg.Input((TOKENS, HIDDEN), Shard(0)),
        "gate": gg.Input((HIDDEN, EXPERTS)),
        "experts": gg.Input((EXPERTS, HIDDEN, HIDDEN), Shard(0)),
    },
    "outputs": {"y": Shard(0), "gate": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, ep_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, ep_buggy, **ARGS)
