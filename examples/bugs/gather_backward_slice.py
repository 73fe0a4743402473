"""NVIDIA-NeMo/Automodel #1260: the backward of a gather takes a slice where a sum over the ranks is due.

Expert parallelism gathers all tokens, and each rank runs its own expert on them. So each rank has a part of the gradient
of every token: the parts must be summed and scattered. `DTensor.full_tensor()` keeps this rank's slice instead.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

TOKENS, HIDDEN, EXPERTS = 4, 3, 2
BUG_LINE = "return grad.chunk(dist.get_world_size())[dist.get_rank()]"


def gather(x):
    out = x.new_empty(x.size(0) * dist.get_world_size(), x.size(1))
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def sum_and_scatter(x):
    out = x.new_empty(x.size(0) // dist.get_world_size(), x.size(1))
    dist.reduce_scatter_tensor(out, x.contiguous())
    return out


class Gather(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: gather(x))
    backward = staticmethod(lambda ctx, grad: sum_and_scatter(grad))


class FullTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return gather(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class Combine(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: sum_and_scatter(x))
    backward = staticmethod(lambda ctx, grad: gather(grad))


def sequential(x, experts, dy):
    x.requires_grad_(), experts.requires_grad_()
    torch.tanh(x @ experts).sum(0).backward(dy)
    return {"x": x.grad, "experts": experts.grad}


def step(dispatch, x, experts, dy):
    x.requires_grad_(), experts.requires_grad_()
    Combine.apply(torch.tanh(dispatch(x) @ experts[0])).backward(dy)
    return {"x": x.grad, "experts": experts.grad}


def ep_fixed(x, experts, dy):
    return step(Gather.apply, x, experts, dy)


def ep_buggy(x, experts, dy):
    return step(FullTensor.apply, x, experts, dy)


TOKEN_INPUT = gg.Input((TOKENS, HIDDEN), Shard(0))
ARGS = {
    "mesh": {"ep": 2},
    "inputs": {"x": TOKEN_INPUT, "dy": TOKEN_INPUT, "experts": gg.Input((EXPERTS, HIDDEN, HIDDEN), Shard(0))},
    "outputs": {"x": Shard(0), "experts": Shard(0)},
}


@gg.check
def fixed():
    return gg.verify(sequential, ep_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, ep_buggy, **ARGS)
