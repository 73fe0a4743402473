"""Products of matrices that are cut both ways: in blocks on a square of ranks (2-D), and on layers of squares (2.5-D).

A rank has one block of each matrix. For its block of the product it needs a row of blocks of the one and a column of blocks of
the other. With several layers, each layer has a part of the inner dim: less is gathered, and the layers' products are summed.
In the backward every gather is a sum that is scattered.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

ROWS, INNER, COLUMNS = 4, 8, 6


class Gather(torch.autograd.Function):
    """Blocks side by side along a dim."""

    @staticmethod
    def forward(ctx, block, dim, group):
        ctx.dim, ctx.group = dim, group
        blocks = [torch.empty_like(block) for _ in range(dist.get_world_size(group))]
        dist.all_gather(blocks, block.contiguous(), group=group)
        return torch.cat(blocks, dim)

    @staticmethod
    def backward(ctx, grad):
        parts = [part.contiguous() for part in grad.chunk(dist.get_world_size(ctx.group), ctx.dim)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.group)
        return own, None, None


class GatherWithoutSum(Gather):
    @staticmethod
    def backward(ctx, grad):
        # fault: gradients_of_own_blocks_alone
        own = grad.chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)]
        return own, None, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def product(a, b):
    return a @ b


def in_blocks(a, b, mesh):
    return Gather.apply(a, 1, mesh.get_group("col")) @ Gather.apply(b, 0, mesh.get_group("row"))


def in_layers(a, b, mesh):
    return Sum.apply(in_blocks(a, b, mesh), mesh.get_group("layer"))


def gathered_along_the_column(a, b, mesh):
    # fault: blocks_of_the_wrong_group
    return Gather.apply(a, 1, mesh.get_group("row")) @ Gather.apply(b, 0, mesh.get_group("row"))


def gathered_without_sum(a, b, mesh):
    return GatherWithoutSum.apply(a, 1, mesh.get_group("col")) @ Gather.apply(b, 0, mesh.get_group("row"))


def layers_side_by_side(a, b, mesh):
    # fault: layers_that_are_not_summed
    return in_blocks(a, b, mesh)


def layers_averaged(a, b, mesh):
    # fault: layers_that_are_averaged
    return Sum.apply(in_blocks(a, b, mesh), mesh.get_group("layer")) / mesh.size(0)


def with_gradients(multiply):
    def program(a, b, dy, **given):
        a.requires_grad_(), b.requires_grad_()
        y = multiply(a, b, **given)
        y.backward(dy)
        return {"y": y.detach(), "a": a.grad, "b": b.grad}

    return program


def on_mesh(multiply):
    def program(a, b, dy, mesh):
        return with_gradients(multiply)(a, b, dy, mesh=mesh)

    return program


def check(multiply, mesh):
    blocks = {"row": Shard(0), "col": Shard(1)}
    layered = "layer" in mesh
    a = {"layer": Shard(1), **blocks} if layered else blocks
    b = {"layer": Shard(0), **blocks} if layered else blocks
    inputs = {
        "a": gg.Input((ROWS, INNER), a),
        "b": gg.Input((INNER, COLUMNS), b),
        "dy": gg.Input((ROWS, COLUMNS), blocks),
    }
    outputs = {"y": blocks, "a": a, "b": b}
    return gg.verify(with_gradients(product), on_mesh(multiply), mesh=mesh, inputs=inputs, outputs=outputs)


@gg.check
def two_directions():
    return check(in_blocks, {"row": 2, "col": 2})


@gg.check
def two_and_a_half_directions():
    return check(in_layers, {"layer": 2, "row": 2, "col": 2})


@gg.check(expect="refuted")
def blocks_of_the_wrong_group():
    return check(gathered_along_the_column, {"row": 2, "col": 2})


@gg.check(expect="refuted")
def gradients_of_own_blocks_alone():
    return check(gathered_without_sum, {"row": 1, "col": 2})


@gg.check(expect="refuted")
def layers_that_are_not_summed():
    return check(layers_side_by_side, {"layer": 2, "row": 1, "col": 2})


@gg.check(expect="refuted")
def layers_that_are_averaged():
    return check(layers_averaged, {"layer": 2, "row": 1, "col": 2})
