"""torch 2.13.0: inside of loss_parallel(), the gradient of a log_softmax that no cross entropy follows is wrong.

`loss_parallel` replaces the backward of log_softmax by the identity, since that of its cross entropy has it in itself. Any
other use of log_softmax gets the identity, too.

In training: losses made of log-probabilities (KL divergence, distillation, DPO, label smoothing by hand, z losses) train
with wrong gradients; forwards are right. Reported as pytorch/pytorch #190746.
"""

import real_ranks
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

import graphguard as gg


def distillation(logits, teacher):
    """How far the log-probabilities are from a teacher's."""
    logits.requires_grad_()
    loss = -(teacher * F.log_softmax(logits, dim=-1)).sum()
    return {"loss": loss, "grad": torch.autograd.grad(loss, logits)[0]}


def sharded(logits, teacher, mesh):
    with loss_parallel():
        return distillation(*(DTensor.from_local(each, mesh, [Shard(1)]) for each in (logits, teacher)))


def without_loss_parallel(logits, teacher, mesh):
    return distillation(*(DTensor.from_local(each, mesh, [Shard(1)]) for each in (logits, teacher)))


def case(distributed=sharded):
    vocabulary = {name: gg.Input((3, 8), Shard(1)) for name in ("logits", "teacher")}
    return {"sequential": distillation, "distributed": distributed, "mesh": {"tp": 2}, "inputs": vocabulary}


@gg.check(expect="refuted")
def shipped():
    return gg.verify(**case())


@gg.check
def repaired():
    """Without it, log_softmax gathers the vocabulary."""
    return gg.verify(**case(without_loss_parallel))


if __name__ == "__main__":
    real_ranks.show(**case())
