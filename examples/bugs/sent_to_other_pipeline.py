"""TrainVerify (SOSP '25): a pipeline stage sends its activations to the wrong rank.

Two pipelines work on two halves of the batch. The first stages send to the last stage of the other pipeline, which has the
targets of other examples; both sides count ranks alike, so that every message arrives.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

BATCH, HIDDEN = 4, 3
BUG_LINE = 'return {"w0": None, "w1": averaged(last_stage(y, w1, mesh.size() - 1 - dist.get_rank()), mesh)}'


def sequential(x, y, w0, w1):
    w0.requires_grad_(), w1.requires_grad_()
    F.mse_loss(torch.tanh(x @ w0) @ w1, y).backward()
    return {"w0": w0.grad, "w1": w1.grad}


def first_stage(x, w0, next_stage):
    h = torch.tanh(x @ w0.requires_grad_())
    dist.send(h.detach(), dst=next_stage)
    grad = torch.empty_like(h)
    dist.recv(grad, src=next_stage)
    h.backward(grad)
    return w0.grad


def last_stage(y, w1, stage_before):
    h = torch.empty(BATCH // 2, HIDDEN)
    dist.recv(h, src=stage_before)
    h.requires_grad_()
    F.mse_loss(h @ w1.requires_grad_(), y).backward()
    dist.send(h.grad, dst=stage_before)
    return w1.grad


def averaged(grad, mesh):
    dist.all_reduce(grad, group=mesh.get_group("dp"))
    return grad / mesh["dp"].size()


def fixed_step(x, y, w0, w1, mesh):
    if mesh.get_local_rank("pp") == 0:
        return {"w0": averaged(first_stage(x, w0, dist.get_rank() + mesh["dp"].size()), mesh), "w1": None}
    return {"w0": None, "w1": averaged(last_stage(y, w1, dist.get_rank() - mesh["dp"].size()), mesh)}


def buggy_step(x, y, w0, w1, mesh):
    """The ranks are counted backwards at both ends, which is the stage of the other pipeline."""
    if mesh.get_local_rank("pp") == 0:
        return {"w0": averaged(first_stage(x, w0, mesh.size() - 1 - dist.get_rank()), mesh), "w1": None}
    return {"w0": None, "w1": averaged(last_stage(y, w1, mesh.size() - 1 - dist.get_rank()), mesh)}


ROWS, MATRIX = gg.Input((BATCH, HIDDEN), {"dp": Shard(0)}), gg.Input((HIDDEN, HIDDEN))
INPUTS = {"x": ROWS, "y": ROWS, "w0": MATRIX, "w1": MATRIX}
ARGS = {"mesh": {"pp": 2, "dp": 2}, "inputs": INPUTS, "outputs": {"w0": Replicate(), "w1": Replicate()}}


@gg.check
def fixed():
    return gg.verify(sequential, fixed_step, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, buggy_step, **ARGS)
