"""Programs that look wrong and are right.

A shift of the softmax that is a sum where a maximum is meant (tenstorrent/tt-xla #6075): any shift cancels, over the reals.
A bias that only one rank adds, before the sum. A loss that is multiplied by the number of context-parallel ranks, because
the mean of gradients is taken over more ranks than hold different examples.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, WORDS, HIDDEN, WIDTH, RATE = 8, 6, 4, 6, 0.1


def softmax(scores):
    return scores.softmax(-1)


def softmax_shifted_by_a_sum(scores):
    shift = scores.amax(-1, keepdim=True)
    dist.all_reduce(shift)  # a sum, not a maximum
    weights = torch.exp(scores - shift)
    total = weights.sum(-1, keepdim=True)
    dist.all_reduce(total)
    return weights / total


@gg.check
def the_shift_of_a_softmax_cancels():
    inputs = {"scores": gg.Input((TOKENS, WORDS), Shard(1))}
    return gg.verify(softmax, softmax_shifted_by_a_sum, mesh={"tp": 2}, inputs=inputs)


def linear(x, w, bias):
    return torch.relu(x @ w + bias)


def bias_on_rank_0(x, w, bias):
    y = x @ w
    if dist.get_rank() == 0:
        y = y + bias
    dist.all_reduce(y)
    return torch.relu(y)


@gg.check
def one_rank_adds_the_bias_before_the_sum():
    inputs = {"x": gg.Input((TOKENS, WIDTH), Shard(1)), "w": gg.Input((WIDTH, HIDDEN), Shard(0)), "bias": gg.Input((HIDDEN,))}
    return gg.verify(linear, bias_on_rank_0, mesh={"tp": 2}, inputs=inputs)


def train(x, w):
    torch.tanh(x @ w.requires_grad_()).pow(2).sum(-1).mean().backward()
    return w.detach() - RATE * w.grad


def loss_times_cp(x, w, mesh):
    """The mean over a rank's tokens; every rank of a context-parallel group counts them among all of its group's."""
    cp = mesh["cp"].size()
    loss = torch.tanh(x @ w.requires_grad_()).pow(2).sum(-1).sum() / (x.size(0) * cp)
    (loss * cp).backward()
    dist.all_reduce(w.grad)
    w.grad /= dist.get_world_size()
    return w.detach() - RATE * w.grad


@gg.check
def a_loss_times_cp_with_a_mean_over_all_ranks():
    inputs = {"x": gg.Input((TOKENS, HIDDEN), {"dp": Shard(0), "cp": Shard(0)}), "w": gg.Input((HIDDEN, HIDDEN))}
    return gg.verify(train, loss_times_cp, mesh={"dp": 2, "cp": 2}, inputs=inputs, outputs={"out": Replicate()})
