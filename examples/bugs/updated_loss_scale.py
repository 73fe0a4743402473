"""deepspeedai/DeepSpeed #2695: the gradient norm is divided by the loss scale of the next step.

The loss is multiplied by a scale, and gradients are divided by it again. The scale was updated in between, so that the
norm by which they are clipped belongs to other gradients.
"""

import torch
import torch.distributed as dist

import graphguard as gg

BATCH, HIDDEN, RATE, MAX_NORM, GROWTH = 4, 4, 0.1, 0.05, 2.0
BUG_LINE = "norm = norm_of_shards(own) / scaler.scale  # the scale of the next step"


class LossScaler:
    scale = 2.0**10

    def update(self):
        self.scale = self.scale * GROWTH


def sequential(x, w):
    for part in x.chunk(2):
        w = w.detach().requires_grad_()
        torch.tanh(part @ w).pow(2).mean().backward()
        w = w - RATE * w.grad * (MAX_NORM / w.grad.norm()).clamp(max=1.0)
    return w.detach()


def own_shard_of_gradient(part, w, scale):
    w = w.detach().requires_grad_()
    (torch.tanh(part @ w).pow(2).mean() * scale).backward()
    own = w.new_empty(HIDDEN // dist.get_world_size(), HIDDEN)
    dist.reduce_scatter_tensor(own, w.grad, op=dist.ReduceOp.SUM)
    return own / dist.get_world_size()


def norm_of_shards(own):
    squares = own.pow(2).sum()
    dist.all_reduce(squares)
    return squares.sqrt()


def stepped(w, own, scale, norm):
    """Shard of the parameters, updated and gathered."""
    shard = w.chunk(dist.get_world_size())[dist.get_rank()]
    shard = shard - RATE * own / scale * (MAX_NORM / norm).clamp(max=1.0)
    new = torch.empty_like(w)
    dist.all_gather_into_tensor(new, shard)
    return new


def zero_fixed(x, w):
    scaler = LossScaler()
    for part in x.chunk(2):
        own = own_shard_of_gradient(part, w, scaler.scale)
        norm = norm_of_shards(own) / scaler.scale
        w = stepped(w, own, scaler.scale, norm)
        scaler.update()
    return w


def zero_buggy(x, w):
    scaler = LossScaler()
    for part in x.chunk(2):
        own, used = own_shard_of_gradient(part, w, scaler.scale), scaler.scale
        scaler.update()
        norm = norm_of_shards(own) / scaler.scale  # the scale of the next step
        w = stepped(w, own, used, norm)
    return w


def microbatches_by_rank(full, coord):
    return torch.cat([part.chunk(2)[coord["dp"]] for part in full.chunk(2)])


X, W = gg.Input((BATCH, HIDDEN), local=microbatches_by_rank), gg.Input((HIDDEN, HIDDEN))
ARGS = {"mesh": {"dp": 2}, "inputs": {"x": X, "w": W}}


@gg.check
def fixed():
    return gg.verify(sequential, zero_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, zero_buggy, **ARGS)
