"""bigcode-project/Megatron-LM #11: the gradient of the key bias of multi-query attention is not summed over the ranks.

All heads share one key, which every tensor-parallel rank computes with a copy of its weight and bias, while each rank
has its own query heads. Both gradients must be summed over the ranks; that of the bias was forgotten.

Also: bigcode-project/Megatron-LM #12.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, HEADS, HEAD = 4, 5, 4, 3
BUG_LINE = "k = F.linear(x, wk, bk)"


def gradients(x, q, wk, bk):
    """Of the key's weight and bias, for the query heads at hand."""
    wk.requires_grad_(), bk.requires_grad_()
    k = F.linear(x, wk, bk)
    torch.tanh(q @ k.T).sum().backward()
    return {"wk": wk.grad, "bk": bk.grad}


def sequential(x, q, wk, bk):
    return gradients(x, q, wk, bk)


def tp_fixed(x, q, wk, bk):
    grads = gradients(x, q, wk, bk)
    dist.all_reduce(grads["wk"])
    dist.all_reduce(grads["bk"])
    return grads


def tp_buggy(x, q, wk, bk):
    grads = gradients(x, q, wk, bk)
    dist.all_reduce(grads["wk"])
    return grads


ARGS = {
    "mesh": {"tp": 2},
    "inputs": {
        "x": gg.Input((TOKENS, HIDDEN)),
        "q": gg.Input((HEADS, TOKENS, HEAD), Shard(0)),
        "wk": gg.Input((HEAD, HIDDEN)),
        "bk": gg.Input((HEAD,)),
    },
    "outputs": {"wk": Replicate(), "bk": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, **ARGS)
