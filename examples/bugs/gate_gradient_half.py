"""pytorch/torchtitan #2387, #2416: the gradient of a router's scores covers one rank's tokens, and passes for the whole one.

Every tensor-parallel rank routes all tokens; then each rank takes its share of them through the experts, and the
outputs are gathered again. The gradient of the scores is zero for the tokens of other ranks: it is a part, and has to
be summed.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate

TOKENS, HIDDEN, EXPERTS = 8, 4, 3
BUG_LINE = "scores = own(scores)  # their gradient is this rank's part"


def own(tokens):
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def gathered(x):
    out = x.new_empty(x.size(0) * dist.get_world_size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


class Split(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: own(x).clone())
    backward = staticmethod(lambda ctx, grad: gathered(grad))


class Gather(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: gathered(x))
    backward = staticmethod(lambda ctx, grad: own(grad))  # what follows is the same on all ranks


def experts_of(x, scores, experts):
    return torch.einsum("te,tek->tk", scores, torch.tanh(torch.einsum("th,ehk->tek", x, experts)))


def leaves(*tensors):
    return [tensor.detach().requires_grad_() for tensor in tensors]


def sequential(x, dy, gate, experts):
    x, gate, experts = leaves(x, gate, experts)
    y = experts_of(x, (x @ gate).softmax(-1), experts)
    return dict(zip(("x", "gate", "experts"), torch.autograd.grad(y, (x, gate, experts), dy), strict=True))


def layer_gradients(x, gate, experts, dy, y):
    grads = dict(zip(("x", "gate", "experts"), torch.autograd.grad(y, (x, gate, experts), dy), strict=True))
    dist.all_reduce(grads["experts"])  # each rank's tokens
    return grads


def tp_fixed(x, dy, gate, experts):
    x, gate, experts = leaves(x, gate, experts)
    scores = Split.apply((x @ gate).softmax(-1))
    y = Gather.apply(experts_of(Split.apply(x), scores, experts))
    return layer_gradients(x, gate, experts, dy, y)


def tp_buggy(x, dy, gate, experts):
    x, gate, experts = leaves(x, gate, experts)
    scores = (x @ gate).softmax(-1)
    scores = own(scores)  # their gradient is this rank's part
    y = Gather.apply(experts_of(Split.apply(x), scores, experts))
    return layer_gradients(x, gate, experts, dy, y)


ARGS = {
    "mesh": {"tp": 2},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN)),
        "dy": gg.Input((TOKENS, HIDDEN)),
        "gate": gg.Input((HIDDEN, EXPERTS)),
        "experts": gg.Input((EXPERTS, HIDDEN, HIDDEN)),
    },
    "outputs": {"x": Replicate(), "gate": Replicate(), "experts": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, **ARGS)
