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


def pipeline(x, w, first=first_stage, last=last_stage):
    w.requires_grad_()
    return first(x, w) if dist.get_rank() == 0 else last(x, w)


def check(program):
    inputs = {"x": gg.Input((8, 6)), "w": gg.Input((2, 6, 6), Shard(0))}
    return gg.verify(train, program, mesh={"pp": 2}, inputs=inputs, outputs={"w": Shard(0)})


@gg.check
def two_stage_pipeline():
    return check(pipeline)


# ---------------------------------------------------------------------- and what goes wrong
def backwards_in_the_wrong_order(x, w):
    outputs = [torch.tanh(part @ w[0]) for part in x.chunk(MICROBATCHES)]
    sends = [dist.isend(output.detach(), 1) for output in outputs]
    for output in reversed(outputs):
        gradient = torch.empty_like(output)
        # fault: last_microbatch_first
        dist.recv(gradient, 1)
        output.backward(gradient)
    for send in sends:
        send.wait()
    return {"loss": None, "w": w.grad}


def with_loss(loss_of):
    def stage(x, w):
        total = 0.0
        for part in x.chunk(MICROBATCHES):
            received = torch.empty(part.shape[0], w.shape[1], dtype=x.dtype)
            dist.recv(received, 0)
            received.requires_grad_()
            loss = loss_of(received, w)
            loss.backward()
            dist.send(received.grad, 0)
            total = total + loss.detach()
        return {"loss": total, "w": w.grad}

    return stage


def averaged(received, w):
    # fault: mean_over_microbatches
    return torch.tanh(received @ w[0]).pow(2).sum() / MICROBATCHES


def without_activation(received, w):
    # fault: activation_left_out
    return (received @ w[0]).pow(2).sum()


def reset(received, w):
    w.grad = None
    # fault: gradients_of_the_last_microbatch
    return torch.tanh(received @ w[0]).pow(2).sum()


@gg.check(expect="refuted")
def last_microbatch_first():
    return check(lambda x, w: pipeline(x, w, first=backwards_in_the_wrong_order))


@gg.check(expect="refuted")
def mean_over_microbatches():
    return check(lambda x, w: pipeline(x, w, last=with_loss(averaged)))


@gg.check(expect="refuted")
def activation_left_out():
    return check(lambda x, w: pipeline(x, w, last=with_loss(without_activation)))


@gg.check(expect="refuted")
def gradients_of_the_last_microbatch():
    return check(lambda x, w: pipeline(x, w, last=with_loss(reset)))
