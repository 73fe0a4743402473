"""NVIDIA/Megatron-LM #5047: auxiliary losses shrink with the tensor-parallel size where the loss is counted per token.

Gradients are summed over ranks and microbatches, and divided by the number of all tokens at the end. A loss that is a
mean has to be multiplied by as many tokens before. It was multiplied by this rank's tokens, though it had been divided
by the number of ranks, too.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, EXPERTS, COEFFICIENT = 8, 4, 3, 0.5
BUG_LINE = "z_loss = z_loss * logits.size(0)"


def z_loss_of(logits, ranks):
    return COEFFICIENT / ranks * torch.logsumexp(logits, -1).square().mean()


def summed_loss(x, logits, experts, y):
    out = torch.einsum("te,th,ehk->tk", logits.softmax(-1), x, experts)
    return (out - y).abs().sum()


def sequential(x, y, router, experts):
    router.requires_grad_()
    logits = x @ router
    loss = summed_loss(x, logits, experts, y) / TOKENS + z_loss_of(logits, ranks=1)
    return {"router": torch.autograd.grad(loss, router)[0]}


def per_token(loss, tokens, router):
    """The gradient of the whole batch: sums over the ranks, divided by the tokens of all of them."""
    (grad,) = torch.autograd.grad(loss, router)
    tokens = torch.tensor(tokens)
    dist.all_reduce(grad)
    dist.all_reduce(tokens)
    return {"router": grad / tokens}


def sp_fixed(x, y, router, experts, mesh):
    logits = x @ router.requires_grad_()
    z_loss = z_loss_of(logits, mesh.size())
    z_loss = z_loss * logits.size(0) * mesh.size()
    return per_token(summed_loss(x, logits, experts, y) + z_loss, logits.size(0), router)


def sp_buggy(x, y, router, experts, mesh):
    logits = x @ router.requires_grad_()
    z_loss = z_loss_of(logits, mesh.size())
    z_loss = z_loss * logits.size(0)
    return per_token(summed_loss(x, logits, experts, y) + z_loss, logits.size(0), router)


ARGS = {
    "mesh": {"tp": 4},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN), Shard(0)),
        "y": gg.Input((TOKENS, HIDDEN), Shard(0)),
        "router": gg.Input((HIDDEN, EXPERTS)),
        "experts": gg.Input((EXPERTS, HIDDEN, HIDDEN)),
    },
    "outputs": {"router": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, sp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, sp_buggy, **ARGS)
