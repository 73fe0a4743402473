"""pytorch/torchtitan #2532, #2217: on a mesh of two axes the gradient of a norm's weight is summed over one of them.

The norm runs on a part of the batch (dp) and of the sequence (tp). A bare `to_local()` says that the gradient is the
same on all ranks of the tensor-parallel axis, so only the data-parallel sum is done.
"""

import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import graphguard as gg
from graphguard import Partial, Replicate, Shard

BATCH, SEQUENCE, HIDDEN = 2, 4, 6
BUG_LINE = "normed(x, weight.to_local()).backward(dy)"


def normed(x, weight):
    return F.rms_norm(x, (HIDDEN,), weight).tanh()


def sequential(x, dy, weight):
    weight.requires_grad_()
    normed(x, weight).backward(dy)
    return {"weight": weight.grad}


def data_parallel_sum(grad, mesh):
    grad = grad.full_tensor()
    dist.all_reduce(grad, group=mesh.get_group("dp"))
    return {"weight": grad}


def tp_fixed(x, dy, weight, mesh):
    weight = DTensor.from_local(weight, mesh["tp"], [Replicate()]).requires_grad_()
    normed(x, weight.to_local(grad_placements=[Partial()])).backward(dy)
    return data_parallel_sum(weight.grad, mesh)


def tp_buggy(x, dy, weight, mesh):
    weight = DTensor.from_local(weight, mesh["tp"], [Replicate()]).requires_grad_()
    normed(x, weight.to_local()).backward(dy)
    return data_parallel_sum(weight.grad, mesh)


TOKENS = gg.Input((BATCH, SEQUENCE, HIDDEN), {"dp": Shard(0), "tp": Shard(1)})
ARGS = {
    "mesh": {"dp": 2, "tp": 2},
    "inputs": {"x": TOKENS, "dy": TOKENS, "weight": gg.Input((HIDDEN,))},
    "outputs": {"weight": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, **ARGS)
