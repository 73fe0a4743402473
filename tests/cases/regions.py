"""The regions of tensor and sequence parallelism: collectives whose backward is another collective."""

import torch
import torch.distributed as dist


class CopyToRegion(torch.autograd.Function):
    """Identity; the gradient is summed over the group."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromRegion(torch.autograd.Function):
    """Sum over the group; the gradient passes."""

    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def split_first(x, group):
    size = x.size(0) // dist.get_world_size(group)
    return x.narrow(0, dist.get_rank(group) * size, size).contiguous()


def gather_first(x, group):
    out = x.new_empty(x.size(0) * dist.get_world_size(group), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def reduce_scatter_first(x, group):
    out = x.new_empty(x.size(0) // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def split_last(x, group):
    return x.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)].contiguous()


def gather_last(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, -1)


class ScatterToRegion(torch.autograd.Function):
    """Keep this rank's part of the last dim; the gradient's parts are gathered."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return split_last(x, group)

    @staticmethod
    def backward(ctx, grad):
        return gather_last(grad, ctx.group), None


class GatherFromRegion(torch.autograd.Function):
    """Gather the last dim; a rank keeps its part of the gradient, which is the same on all."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather_last(x, group)

    @staticmethod
    def backward(ctx, grad):
        return split_last(grad, ctx.group), None


class ScatterToSequenceRegion(torch.autograd.Function):
    """Keep this rank's part of the sequence; the gradient's parts are gathered."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return split_first(x, group)

    @staticmethod
    def backward(ctx, grad):
        return gather_first(grad, ctx.group), None


class GatherFromSequenceRegion(torch.autograd.Function):
    """Gather the sequence; the gradients are summed and scattered, as every rank used the whole for a part of its own."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather_first(x, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_first(grad, ctx.group), None


class ReduceScatterToSequenceRegion(torch.autograd.Function):
    """Sum over the group and keep this rank's part of the sequence; the gradient's parts are gathered."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scatter_first(x, group)

    @staticmethod
    def backward(ctx, grad):
        return gather_first(grad, ctx.group), None


def copy_to(x, group):
    return CopyToRegion.apply(x, group)


def reduce_from(x, group):
    return ReduceFromRegion.apply(x, group)


def scatter_to(x, group):
    return ScatterToRegion.apply(x, group)


def gather_from(x, group):
    return GatherFromRegion.apply(x, group)


def scatter_sequence(x, group):
    return ScatterToSequenceRegion.apply(x, group)


def gather_sequence(x, group):
    return GatherFromSequenceRegion.apply(x, group)


def reduce_scatter_sequence(x, group):
    return ReduceScatterToSequenceRegion.apply(x, group)
