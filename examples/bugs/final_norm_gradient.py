"""NVIDIA/Megatron-LM #1446: the gradients of the final LayerNorm are not summed under sequence parallelism.

The norm before the head runs on each rank's own tokens. Its weight and bias are replicated, their gradients are not:
each rank has those of its tokens, and they were never summed over the tensor-parallel group before the update.

Also: hpcaitech/ColossalAI #4927.
"""

import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, LR = 8, 6, 0.1
BUG_LINE = 'return {"weight": weight.detach() - LR * grads[0], "bias": bias.detach() - LR * grads[1]}'


def loss_backward(x, target, weight, bias):
    weight.requires_grad_(), bias.requires_grad_()
    y = F.layer_norm(x, (HIDDEN,), weight, bias)
    ((y - target) ** 2).sum().backward()
    return weight.grad, bias.grad


def update(weight, bias, grads):
    return {"weight": weight.detach() - LR * grads[0], "bias": bias.detach() - LR * grads[1]}


def sequential(x, target, weight, bias):
    return update(weight, bias, loss_backward(x, target, weight, bias))


def sp_fixed(x, target, weight, bias):
    grads = loss_backward(x, target, weight, bias)
    for grad in grads:
        dist.all_reduce(grad)
    return update(weight, bias, grads)


def sp_buggy(x, target, weight, bias):
    grads = loss_backward(x, target, weight, bias)
    return update(weight, bias, grads)


ARGS = {
    "mesh": {"tp": 4},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN), Shard(0)),
        "target": gg.Input((TOKENS, HIDDEN), Shard(0)),
        "weight": gg.Input((HIDDEN,)),
        "bias": gg.Input((HIDDEN,)),
    },
    "outputs": {"weight": Replicate(), "bias": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, sp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, sp_buggy, **ARGS)
