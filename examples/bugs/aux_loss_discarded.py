"""NVIDIA-NeMo/Automodel #1408, #1412: what attaches a balancing loss to the forward is called, and its result is dropped.

The auxiliary loss of a router joins the backward through a function that passes its first argument on. Called for its
effect alone it has none: nothing that the loss depends on went through it, and the router is never balanced.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.func import functional_call

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, EXPERTS, WEIGHT = 8, 4, 3, 0.1
BUG_LINE = "AutoScaler.apply(scores, auxiliary)"


class AutoScaler(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, loss):
        ctx.save_for_backward(loss)
        return scores.clone()

    @staticmethod
    def backward(ctx, grad):
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(HIDDEN, EXPERTS, bias=False)

    def forward(self, x):
        scores = self.proj(x).softmax(-1)
        auxiliary = WEIGHT * scores.square().sum(-1).mean()
        return AutoScaler.apply(scores, auxiliary)


class DisconnectedGate(Gate):
    def forward(self, x):
        scores = self.proj(x).softmax(-1)
        auxiliary = WEIGHT * scores.square().sum(-1).mean()
        AutoScaler.apply(scores, auxiliary)
        return scores


def gradient(gate, x, y, w, experts):
    w.requires_grad_()
    scores = functional_call(gate, {"proj.weight": w}, (x,))
    out = sum(scores[:, [e]] * torch.tanh(x @ expert) for e, expert in enumerate(experts.unbind()))
    (out - y).square().sum(-1).mean().backward()
    return w.grad


def sequential(x, y, w, experts):
    return {"w": gradient(Gate(), x, y, w, experts)}


def dp_fixed(x, y, w, experts):
    grad = gradient(Gate(), x, y, w, experts)
    dist.all_reduce(grad)
    return {"w": grad / dist.get_world_size()}


def dp_buggy(x, y, w, experts):
    grad = gradient(DisconnectedGate(), x, y, w, experts)
    dist.all_reduce(grad)
    return {"w": grad / dist.get_world_size()}


BY_TOKEN = gg.Input((TOKENS, HIDDEN), Shard(0))
WEIGHTS = {"w": gg.Input((EXPERTS, HIDDEN)), "experts": gg.Input((EXPERTS, HIDDEN, HIDDEN))}
ARGS = {"mesh": {"dp": 2}, "inputs": {"x": BY_TOKEN, "y": BY_TOKEN, **WEIGHTS}, "outputs": {"w": Replicate()}}


@gg.check
def fixed():
    return gg.verify(sequential, dp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, dp_buggy, **ARGS)
