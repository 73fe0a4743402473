"""huggingface/transformers #48687, #48689: slots of experts on other ranks are masked in the forward, not in the gradient.

A slot whose expert is elsewhere runs through some expert of this rank, and its result is multiplied by zero. The
gradient of its score is that result, unmasked: it is added to the right one of the rank that has the expert.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, EXPERTS, SLOTS = 4, 3, 4, 2
BUG_LINE = "grad_scores = (grad.unsqueeze(1) * slots).sum(-1)"


class Combine(torch.autograd.Function):
    """Sum over the slots, each times its score where its expert is here."""

    @staticmethod
    def forward(ctx, slots, scores, here):
        ctx.save_for_backward(slots, scores, here)
        return (slots * (scores * here).unsqueeze(-1)).sum(1)

    @staticmethod
    def backward(ctx, grad):
        slots, scores, here = ctx.saved_tensors
        grad_scores = (grad.unsqueeze(1) * slots).sum(-1) * here
        return grad.unsqueeze(1) * (scores * here).unsqueeze(-1), grad_scores, None


class CombineUnmasked(Combine):
    @staticmethod
    def backward(ctx, grad):
        slots, scores, here = ctx.saved_tensors
        grad_scores = (grad.unsqueeze(1) * slots).sum(-1)
        return grad.unsqueeze(1) * (scores * here).unsqueeze(-1), grad_scores, None


class Summed(torch.autograd.Function):
    """The scores are whole on every rank; their gradient is summed."""

    @staticmethod
    def forward(ctx, scores):
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


def sequential(x, dy, indices, router, experts):
    router.requires_grad_(), experts.requires_grad_()
    scores = torch.sigmoid((x @ router).gather(1, indices))
    slots = torch.einsum("th,tshk->tsk", x, experts[indices])
    (slots * scores.unsqueeze(-1)).sum(1).backward(dy)
    return {"router": router.grad, "experts": experts.grad}


def ep_step(x, dy, indices, router, experts, combine):
    router.requires_grad_(), experts.requires_grad_()
    scores = Summed.apply(torch.sigmoid((x @ router).gather(1, indices)))
    local = indices - dist.get_rank() * len(experts)
    here = (local >= 0) & (local < len(experts))
    slots = torch.einsum("th,tshk->tsk", x, experts[local.clamp(0, len(experts) - 1)])
    combine.apply(slots, scores, here).backward(dy)
    return {"router": router.grad, "experts": experts.grad}


ARGS = {
    "mesh": {"ep": 2},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN)),
        "dy": gg.Input((TOKENS, HIDDEN)),
        "indices": gg.Input((TOKENS, SLOTS), dtype=torch.int64, low=0, high=EXPERTS),
        "router": gg.Input((HIDDEN, EXPERTS)),
        "experts": gg.Input((EXPERTS, HIDDEN, HIDDEN), Shard(0)),
    },
    "outputs": {"router": Replicate(), "experts": Shard(0)},
}


@gg.check
def fixed():
    return gg.verify(sequential, lambda **kw: ep_step(**kw, combine=Combine), **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, lambda **kw: ep_step(**kw, combine=CombineUnmasked), **ARGS)
