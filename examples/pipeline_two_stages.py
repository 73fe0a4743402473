"""Pipeline parallelism by hand: two stages, four microbatches, activations sent forward and gradients sent back."""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

MICROBATCHES = 4


def train(x, w):
    w.requires_grad_()
    y = torch.tanh(torch.tanh(x @ w[0]) @ w[1])
    loss = y.pow(2).sum()
    loss.backward()
    return {"loss": loss.detach(), "w": w.grad}


def first_stage(x, w):
    outputs = [torch.tanh(part @ w[0]) for part in x.chunk(MICROBATCHES)]
    sends = [dist.isend(output.detach(), 1) for output in outputs]
    for output in outputs:
        gradient = torch.empty_like(output)
        dist.recv(gradient, 1)
        output.backward(gradient)
    for send in sends:
        send.wait()
    return {"loss": None, "w": w.grad}


def last_stage(x, w):
    total = 0.0
    for part in x.chunk(MICROBATCHES):
        received = torch.empty(part.shape[0], w.shape[1], dtype=x.dtype)
        dist.recv(received, 0)
        received.requires_grad_()
        loss = torch.tanh(received @ w[0]).pow(2).sum()
        loss.backward()
        dist.send(received.grad, 0)
        total = total + loss.detach()
    return {"loss": total, "w": w.grad}


def pipeline(x, w):
    w.requires_grad_()
    return first_stage(x, w) if dist.get_rank() == 0 else last_stage(x, w)


@gg.check
def two_stage_pipeline():
    return gg.verify(
        train,
        pipeline,
        mesh={"pp": 2},
        inputs={"x": gg.Input((8, 6)), "w": gg.Input((2, 6, 6), Shard(0))},
        outputs={"w": Shard(0)},
    )
