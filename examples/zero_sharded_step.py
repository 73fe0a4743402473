"""ZeRO by hand: each data-parallel rank keeps and updates its own rows of the parameter, with an optimizer of its own.

The parameter is gathered for the forward, and its gradient is reduced and scattered; two steps of Adam, as the second
one reads the moments that the first one left behind.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

BATCH, HIDDEN, WIDTH = 8, 4, 6


def gradient(x, target, w):
    w = w.detach().requires_grad_()
    F.mse_loss(torch.tanh(x @ w), target).backward()
    return w.grad


def train(x, target, w):
    optimizer = torch.optim.Adam([w.requires_grad_()], lr=0.01)
    for _ in range(2):
        w.grad = gradient(x, target, w)
        optimizer.step()
    return w.detach()


def gathered(w):
    whole = w.new_empty(w.size(0) * dist.get_world_size(), w.size(1))
    dist.all_gather_into_tensor(whole, w.detach())
    return whole


def zero_train(x, target, w):
    world = dist.get_world_size()
    optimizer = torch.optim.Adam([w.requires_grad_()], lr=0.01)
    for _ in range(2):
        w.grad = torch.empty_like(w)
        dist.reduce_scatter_tensor(w.grad, gradient(x, target, gathered(w)))
        w.grad /= world
        optimizer.step()
    return w.detach()


def verify(program):
    inputs = {
        "x": gg.Input((BATCH, HIDDEN), Shard(0)),
        "target": gg.Input((BATCH, WIDTH), Shard(0)),
        "w": gg.Input((HIDDEN, WIDTH), Shard(0)),
    }
    return gg.verify(train, program, mesh={"dp": 2}, inputs=inputs, outputs={"out": Shard(0)})


@gg.check
def sharded_adam():
    return verify(zero_train)


# ---------------------------------------------------------------------- and what goes wrong
def first_rows(x, target, w):
    world = dist.get_world_size()
    optimizer = torch.optim.Adam([w.requires_grad_()], lr=0.01)
    for _ in range(2):
        grad = gradient(x, target, gathered(w))
        dist.all_reduce(grad)
        # fault: gradients_of_the_first_rows
        w.grad = grad[: w.size(0)] / world
        optimizer.step()
    return w.detach()


def largest_of_all(x, target, w):
    optimizer = torch.optim.Adam([w.requires_grad_()], lr=0.01)
    for _ in range(2):
        w.grad = torch.empty_like(w)
        # fault: largest_gradient
        dist.reduce_scatter_tensor(w.grad, gradient(x, target, gathered(w)), op=dist.ReduceOp.MAX)
        optimizer.step()
    return w.detach()


def gathered_once(x, target, w):
    world = dist.get_world_size()
    optimizer = torch.optim.Adam([w.requires_grad_()], lr=0.01)
    whole = gathered(w)
    for _ in range(2):
        w.grad = torch.empty_like(w)
        # fault: second_step_sees_old_parameters
        dist.reduce_scatter_tensor(w.grad, gradient(x, target, whole))
        w.grad /= world
        optimizer.step()
    return w.detach()


def own_gradient(x, target, w):
    world, rank = dist.get_world_size(), dist.get_rank()
    optimizer = torch.optim.Adam([w.requires_grad_()], lr=0.01)
    for _ in range(2):
        # fault: gradients_of_own_batch
        w.grad = gradient(x, target, gathered(w)).chunk(world)[rank]
        optimizer.step()
    return w.detach()


def new_optimizer(x, target, w):
    world = dist.get_world_size()
    for _ in range(2):
        w.grad = torch.empty_like(w)
        dist.reduce_scatter_tensor(w.grad, gradient(x, target, gathered(w)))
        w.grad /= world
        # fault: moments_are_forgotten
        torch.optim.Adam([w.requires_grad_()], lr=0.01).step()
    return w.detach()


@gg.check(expect="refuted")
def gradients_of_the_first_rows():
    return verify(first_rows)


@gg.check(expect="refuted")
def largest_gradient():
    return verify(largest_of_all)


@gg.check(expect="refuted")
def second_step_sees_old_parameters():
    return verify(gathered_once)


@gg.check(expect="refuted")
def gradients_of_own_batch():
    return verify(own_gradient)


@gg.check(expect="refuted")
def moments_are_forgotten():
    return verify(new_optimizer)
