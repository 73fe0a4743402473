"""Convolutions split by channels, by samples, and by positions, where windows at the edge need the neighbours' ends."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.leaves import gradients, leaves
from cases.regions import copy_to, reduce_from
from graphguard import Input, Shard

BATCH, CHANNELS, OUT, LENGTH, KERNEL = 4, 4, 8, 16, 3


def swapped(x, dim, width):
    """The ends of the neighbours before and behind, zeros where there is none."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first, last = x.narrow(dim, 0, width).contiguous(), x.narrow(dim, x.size(dim) - width, width).contiguous()
    before, behind = torch.zeros_like(first), torch.zeros_like(last)
    operations = []
    if rank > 0:
        operations += [dist.P2POp(dist.isend, first, rank - 1), dist.P2POp(dist.irecv, before, rank - 1)]
    if rank < size - 1:
        operations += [dist.P2POp(dist.isend, last, rank + 1), dist.P2POp(dist.irecv, behind, rank + 1)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return before, behind


class Halo(torch.autograd.Function):
    """A part with the ends of its neighbours; in the backward their gradients go home, where they are added."""

    @staticmethod
    def forward(ctx, x, dim, width):
        ctx.dim, ctx.width = dim, width
        before, behind = swapped(x, dim, width)
        return torch.cat([before, x, behind], dim)

    @staticmethod
    def backward(ctx, grad):
        dim, width = ctx.dim, ctx.width
        size = grad.size(dim) - 2 * width
        before, own, behind = grad.split([width, size, width], dim)
        from_before, from_behind = swapped(torch.cat([before, behind], dim), dim, width)
        own = own.clone()
        own.narrow(dim, 0, width).add_(from_before)
        own.narrow(dim, size - width, width).add_(from_behind)
        return own, None, None


class HaloWithoutHomecoming(Halo):
    @staticmethod
    def backward(ctx, grad):
        size = grad.size(ctx.dim) - 2 * ctx.width
        return grad.narrow(ctx.dim, ctx.width, size), None, None  # fault: gradients of the neighbours' ends are lost


def total(value):
    value = value.clone()
    dist.all_reduce(value)
    return value


def stepped(layer, summed=()):
    def step(x, w, dy):
        p = leaves({"x": x, "w": w})
        y = layer(p["x"], p["w"])
        grads = gradients(y, p, dy)
        return {"y": y.detach(), "grads": {name: total(grad) if name in summed else grad for name, grad in grads.items()}}

    return step


# ---------------------------------------------------------------------- layers
def same_length(x, w):
    return F.conv1d(x, w, padding=1)


def with_halo(x, w):
    return F.conv1d(Halo.apply(x, 2, 1), w)


def dilated(x, w):
    return F.conv1d(x, w, padding=2, dilation=2)


def dilated_with_halo(x, w):
    return F.conv1d(Halo.apply(x, 2, 2), w, dilation=2)


def in_two_dims(x, w):
    return F.conv2d(x.unflatten(-1, (4, 4)), w.unsqueeze(-1), padding=(1, 0)).flatten(2)


def out_channels(x, w):
    return F.conv1d(copy_to(x, None), w, padding=1)


def in_channels(x, w):
    return reduce_from(F.conv1d(x, w, padding=1), None)


# ---------------------------------------------------------------------- faults
def padded_at_each_edge(x, w):
    return F.conv1d(x, w, padding=1)  # fault: zeros where the neighbours' ends should be


def narrow_halo(x, w):
    return F.conv1d(F.pad(Halo.apply(x, 2, 1), (1, 1)), w, dilation=2)  # fault: the halo is as wide as without gaps


def halo_forgotten_in_backward(x, w):
    return F.conv1d(HaloWithoutHomecoming.apply(x, 2, 1), w)


def ends_exchanged(x, w):
    before, behind = swapped(x, 2, 1)
    return F.conv1d(torch.cat([behind, x, before], 2), w)  # fault: the ends are on the wrong sides


# ---------------------------------------------------------------------- cases
def case_of(name, sequential, distributed, ranks, split, summed=()):
    """split: which dim of x, w and dy is."""
    shapes = {"x": (BATCH, CHANNELS, LENGTH), "w": (OUT, CHANNELS, KERNEL), "dy": (BATCH, OUT, LENGTH)}
    placed = {key: {"sp": Shard(dim)} for key, dim in split.items()}
    inputs = {key: Input(shape, placed.get(key, {})) for key, shape in shapes.items()}
    relation = {"y": placed.get("dy", {}), "grads.x": placed.get("x", {}), "grads.w": placed.get("w", {})}
    program = stepped(distributed, summed)
    return Case(f"convolution-{name}-{ranks}", stepped(sequential), program, {"sp": ranks}, inputs, relation)


LENGTHS = {"x": 2, "dy": 2}


def correct(ranks):
    return [
        case_of("halo", same_length, with_halo, ranks, LENGTHS, ("w",)),
        case_of("halo-dilated", dilated, dilated_with_halo, ranks, LENGTHS, ("w",)),
        case_of("samples", same_length, same_length, ranks, {"x": 0, "dy": 0}, ("w",)),
        case_of("samples-in-two-dims", in_two_dims, in_two_dims, ranks, {"x": 0, "dy": 0}, ("w",)),
        case_of("out-channels", same_length, out_channels, ranks, {"w": 0, "dy": 1}),
        case_of("in-channels", same_length, in_channels, ranks, {"x": 1, "w": 1}),
    ]


def faults():
    base, gaps = case_of("", same_length, None, 2, LENGTHS), case_of("", dilated, None, 2, LENGTHS)
    seeded = [
        (base, "padded", padded_at_each_edge, "zeros where the neighbours' ends should be"),
        (gaps, "narrow", narrow_halo, "the halo is as wide as without gaps"),
        (base, "backward", halo_forgotten_in_backward, "gradients of the neighbours' ends are lost"),
        (base, "sides", ends_exchanged, "the ends are on the wrong sides"),
    ]
    return [
        faulty(case, f"convolution-fault-{name}", stepped(program, ("w",)), fault, stated=("*",))
        for case, name, program, fault in seeded
    ]


CASES = [*[case for ranks in (2, 4) for case in correct(ranks)], *faults()]
