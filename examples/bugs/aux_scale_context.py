"""NVIDIA/Megatron-LM #2217: the gradient of a balancing loss is too small by the context-parallel size.

All gradients are averaged over the ranks that share a sequence. The main loss is multiplied by their number beforehand;
the balancing loss joins backward with a scale of its own, which knew the number of microbatches only.

Also: NVIDIA/Megatron-LM #3943, #3959.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, EXPERTS, MICROBATCHES = 4, 4, 3, 2
BUG_LINE = "scale = torch.tensor(1 / MICROBATCHES)"


class AutoScaler(torch.autograd.Function):
    """Passes its first argument on; backward, the second one is a loss with the gradient `scale`."""

    @staticmethod
    def forward(ctx, output, loss, scale):
        ctx.save_for_backward(scale)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):
        (scale,) = ctx.saved_tensors
        return grad, scale, None


def routed(x, routes, router, experts, load, scale):
    probs = F.softmax(x @ router, dim=-1)
    auxiliary = EXPERTS * (probs.sum(0) * load).sum() / TOKENS**2
    probs = AutoScaler.apply(probs, auxiliary, scale)
    return torch.einsum("te,th,ehk->tk", probs * routes, x, experts)


def sequential(x, routes, y, router, experts):
    router.requires_grad_()
    for mx, mroutes, my in zip(x, routes, y, strict=True):
        out = routed(mx, mroutes, router, experts, mroutes.sum(0), torch.tensor(1 / MICROBATCHES))
        ((out - my).pow(2).sum() / TOKENS / MICROBATCHES).backward()
    return {"router": router.grad}


def cp_step(x, routes, y, router, experts, scale):
    router.requires_grad_()
    cp = dist.get_world_size()
    for mx, mroutes, my in zip(x, routes, y, strict=True):
        load = mroutes.sum(0)
        dist.all_reduce(load)
        out = routed(mx, mroutes, router, experts, load, scale)
        ((out - my).pow(2).sum() / TOKENS * cp / MICROBATCHES).backward()
    dist.all_reduce(router.grad)
    return {"router": router.grad / cp}


def cp_fixed(x, routes, y, router, experts):
    return cp_step(x, routes, y, router, experts, torch.tensor(dist.get_world_size() / MICROBATCHES))


def cp_buggy(x, routes, y, router, experts):
    scale = torch.tensor(1 / MICROBATCHES)
    return cp_step(x, routes, y, router, experts, scale)


BY_TOKEN = Shard(1)
ARGS = {
    "mesh": {"cp": 2},
    "inputs": {
        "x": gg.Input((MICROBATCHES, TOKENS, HIDDEN), BY_TOKEN),
        "routes": gg.Input((MICROBATCHES, TOKENS, EXPERTS), BY_TOKEN),
        "y": gg.Input((MICROBATCHES, TOKENS, HIDDEN), BY_TOKEN),
        "router": gg.Input((HIDDEN, EXPERTS)),
        "experts": gg.Input((EXPERTS, HIDDEN, HIDDEN)),
    },
    "outputs": {"router": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, cp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, cp_buggy, **ARGS)
