"""Sequence parallelism: norms and residuals on a part of the sequence, products on the whole of it."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F

import graphguard as gg
from cases.case import Case, faulty
from cases.regions import gather_first, gather_sequence, reduce_scatter_first, reduce_scatter_sequence, scatter_sequence
from graphguard import Shard

NAMES = ("x", "g", "a", "b", "c")


def leaves(*tensors):
    return [tensor.requires_grad_() for tensor in tensors]


def differentiated(y, dy, *inputs):
    return {"y": y.detach(), "grads": dict(zip(NAMES, torch.autograd.grad(y, inputs, dy), strict=True))}


def norm(x, g):
    return F.rms_norm(x, (x.size(-1),), g, 1e-5)


def block(x, g, a, b, c, dy):
    """A norm, a feed-forward layer with a bias, and a residual."""
    leaves(x, g, a, b, c)
    y = x + F.gelu(norm(x, g) @ a) @ b + c
    return differentiated(y, dy, x, g, a, b, c)


def sum_replicated(out, *names):
    """What every rank has a copy of has seen a part of the sequence only."""
    for name in names:
        dist.all_reduce(out["grads"][name])
    return out


# ---------------------------------------------------------------------- the sequence is the first dim
def by_regions(x, g, a, b, c, dy):
    leaves(x, g, a, b, c)
    h = gather_sequence(norm(x, g), None)
    y = x + reduce_scatter_sequence(F.gelu(h @ a) @ b, None) + c
    return sum_replicated(differentiated(y, dy, x, g, a, b, c), "g", "c")


def by_functional_collectives(x, g, a, b, c, dy, mesh):
    leaves(x, g, a, b, c)
    group = mesh["tp"].get_group()
    h = functional.all_gather_tensor_autograd(norm(x, g), 0, group)
    y = x + functional.reduce_scatter_tensor_autograd(F.gelu(h @ a) @ b, "sum", 0, group) + c
    return sum_replicated(differentiated(y, dy, x, g, a, b, c), "g", "c")


def by_differentiable_collectives(x, g, a, b, c, dy):
    """torch.distributed.nn: all_gather's backward sums, so the ranks' products add up."""
    leaves(x, g, a, b, c)
    h = torch.cat(differentiable.all_gather(norm(x, g)))
    parts = F.gelu(h @ a) @ b
    own = differentiable.reduce_scatter(torch.empty_like(x), list(parts.chunk(dist.get_world_size())))
    return sum_replicated(differentiated(x + own + c, dy, x, g, a, b, c), "g", "c")


class GatheredProduct(torch.autograd.Function):
    """gather(x) @ w that keeps only the local x, and gathers it once more in the backward."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return gather_first(x, None) @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        whole = gather_first(x, None)
        dx = reduce_scatter_first(grad @ w.t(), None)
        return dx, whole.flatten(0, -2).t() @ grad.flatten(0, -2)


def by_regathering(x, g, a, b, c, dy):
    leaves(x, g, a, b, c)
    h = F.gelu(GatheredProduct.apply(norm(x, g), a))
    y = x + reduce_scatter_sequence(h @ b, None) + c
    return sum_replicated(differentiated(y, dy, x, g, a, b, c), "g", "c")


def by_one_bucket(x, g, a, b, c, dy):
    """The gradients of all replicated parameters are summed in one buffer."""
    leaves(x, g, a, b, c)
    h = gather_sequence(norm(x, g), None)
    out = differentiated(x + reduce_scatter_sequence(F.gelu(h @ a) @ b, None) + c, dy, x, g, a, b, c)
    bucket = torch.cat([out["grads"]["g"], out["grads"]["c"]])
    dist.all_reduce(bucket)
    out["grads"]["g"], out["grads"]["c"] = bucket.chunk(2)
    return out


def gathers_only_inside(x, g, a, b, c, dy):
    """The block's ends are whole: the sequence is scattered on entry and gathered on exit."""
    leaves(x, g, a, b, c)
    own = scatter_sequence(x, None)
    h = gather_sequence(norm(own, g), None)
    y = own + reduce_scatter_sequence(F.gelu(h @ a) @ b, None) + c
    y = WholeFromSequence.apply(y)
    return sum_replicated(differentiated(y, dy, x, g, a, b, c), "g", "c")


class WholeFromSequence(torch.autograd.Function):
    """Gathered for a use that is the same on all ranks: each keeps its part of the gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.size(0)
        return gather_first(x, None)

    @staticmethod
    def backward(ctx, grad):
        return grad.narrow(0, dist.get_rank() * ctx.rows, ctx.rows).contiguous()


# ---------------------------------------------------------------------- the sequence is the second dim
class GatherSecond(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return gather_second(x)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_second(grad)


class ReduceScatterSecond(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return reduce_scatter_second(x)

    @staticmethod
    def backward(ctx, grad):
        return gather_second(grad)


def gather_second(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def reduce_scatter_second(x):
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), 1)]
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, parts)
    return out


def batch_first(x, g, a, b, c, dy):
    leaves(x, g, a, b, c)
    h = GatherSecond.apply(norm(x, g))
    y = x + ReduceScatterSecond.apply(F.gelu(h @ a) @ b) + c
    return sum_replicated(differentiated(y, dy, x, g, a, b, c), "g", "c")


# ---------------------------------------------------------------------- two blocks, trained by a loss
def two_blocks(x, t, g1, a1, b1, g2, a2, b2):
    weights = leaves(x, g1, a1, b1, g2, a2, b2)
    x = x + torch.relu(F.layer_norm(x, x.shape[-1:], g1) @ a1) @ b1
    y = x + torch.relu(F.layer_norm(x, x.shape[-1:], g2) @ a2) @ b2
    return trained((y - t).square().mean(), weights)


def trained(loss, weights):
    grads = torch.autograd.grad(loss, weights)
    return {"loss": loss.detach(), "grads": dict(zip(("x", "g1", "a1", "b1", "g2", "a2", "b2"), grads, strict=True))}


def two_split_blocks(x, t, g1, a1, b1, g2, a2, b2):
    weights = leaves(x, g1, a1, b1, g2, a2, b2)
    h = gather_sequence(F.layer_norm(x, x.shape[-1:], g1), None)
    x = x + reduce_scatter_sequence(torch.relu(h @ a1) @ b1, None)
    h = gather_sequence(F.layer_norm(x, x.shape[-1:], g2), None)
    y = x + reduce_scatter_sequence(torch.relu(h @ a2) @ b2, None)
    out = trained((y - t).square().sum() / (t.numel() * dist.get_world_size()), weights)
    dist.all_reduce(out["loss"])
    return sum_replicated(out, "g1", "g2")


# ---------------------------------------------------------------------- with data parallelism
def on_two_axes(x, g, a, b, c, dy, mesh):
    """Outputs and gradients before the gradients are reduced."""
    leaves(x, g, a, b, c)
    tp = mesh["tp"].get_group()
    h = gather_sequence(norm(x, g), tp)
    return differentiated(x + reduce_scatter_sequence(F.gelu(h @ a) @ b, tp) + c, dy, x, g, a, b, c)


def with_data_parallelism(x, g, a, b, c, dy, mesh):
    out = on_two_axes(x, g, a, b, c, dy, mesh)
    for name in ("g", "c"):
        dist.all_reduce(out["grads"][name], group=mesh["tp"].get_group())
    for name in ("g", "a", "b", "c"):
        dist.all_reduce(out["grads"][name], group=mesh["dp"].get_group())
    return out


def norm_reduced_over_one_axis(x, g, a, b, c, dy, mesh):
    out = on_two_axes(x, g, a, b, c, dy, mesh)
    dist.all_reduce(out["grads"]["c"])
    for name in ("a", "b"):
        dist.all_reduce(out["grads"][name], group=mesh["dp"].get_group())
    dist.all_reduce(out["grads"]["g"], group=mesh["dp"].get_group())  # fault: not reduced over the parts of the sequence
    return out


def weights_reduced_over_all(x, g, a, b, c, dy, mesh):
    out = on_two_axes(x, g, a, b, c, dy, mesh)
    for name in ("g", "c"):
        dist.all_reduce(out["grads"][name])
    for name in ("a", "b"):
        dist.all_reduce(out["grads"][name])  # fault: gradients of different shards are summed
    return out


# ---------------------------------------------------------------------- faults
def bias_gradient_not_summed(x, g, a, b, c, dy):
    leaves(x, g, a, b, c)
    h = gather_sequence(norm(x, g), None)
    y = x + reduce_scatter_sequence(F.gelu(h @ a) @ b, None)
    y = y + c  # fault: the bias has seen a part of the sequence only
    return sum_replicated(differentiated(y, dy, x, g, a, b, c), "g")


class GatherWithSlicedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.size(0)
        return gather_first(x, None)

    @staticmethod
    def backward(ctx, grad):
        return grad.narrow(0, dist.get_rank() * ctx.rows, ctx.rows)  # fault: a slice of a gradient that is a partial sum


def gather_with_sliced_gradient(x, g, a, b, c, dy):
    leaves(x, g, a, b, c)
    h = GatherWithSlicedGradient.apply(norm(x, g))
    y = x + reduce_scatter_sequence(F.gelu(h @ a) @ b, None) + c
    return sum_replicated(differentiated(y, dy, x, g, a, b, c), "g", "c")


def scattered_without_sum(x, g, a, b, c, dy):
    leaves(x, g, a, b, c)
    h = gather_sequence(norm(x, g), None)
    own = scatter_sequence(F.gelu(h @ a) @ b, None)
    y = x + own + c  # fault: the product was scattered but never summed
    return sum_replicated(differentiated(y, dy, x, g, a, b, c), "g", "c")


class ReduceScatterOfTotal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        out = x.new_empty(x.size(0) // dist.get_world_size(), *x.shape[1:])
        dist.reduce_scatter_tensor(out, total)  # fault: a total is summed once more
        return out

    @staticmethod
    def backward(ctx, grad):
        return gather_first(grad, None)


def summed_before_reduce_scatter(x, g, a, b, c, dy):
    leaves(x, g, a, b, c)
    h = gather_sequence(norm(x, g), None)
    y = x + ReduceScatterOfTotal.apply(F.gelu(h @ a) @ b) + c
    return sum_replicated(differentiated(y, dy, x, g, a, b, c), "g", "c")


def bias_before_reduce_scatter(x, g, a, b, c, dy):
    leaves(x, g, a, b, c)
    h = gather_sequence(norm(x, g), None)
    part = F.gelu(h @ a) @ b
    part = part + c  # fault: the bias is added on every rank before the sum
    y = x + reduce_scatter_sequence(part, None)
    return sum_replicated(differentiated(y, dy, x, g, a, b, c), "g")


class GatherFromTheRight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts[::-1])  # fault: the parts of the sequence are in reverse order

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_first(torch.cat(grad.chunk(dist.get_world_size())[::-1]), None)


def gathered_from_the_right(x, g, a, b, c, dy):
    leaves(x, g, a, b, c)
    h = GatherFromTheRight.apply(norm(x, g))
    y = x + reduce_scatter_sequence(F.gelu(h @ a) @ b, None) + c
    return sum_replicated(differentiated(y, dy, x, g, a, b, c), "g", "c")


# ---------------------------------------------------------------------- cases
def block_case(name, distributed, size, length=8, hidden=6, wide=16, dim=0):
    sequence = {"tp": Shard(dim)}
    shape = (length, 3, hidden) if dim == 0 else (3, length, hidden)
    inputs = {
        "x": gg.Input(shape, sequence),
        "g": gg.Input((hidden,)),
        "a": gg.Input((hidden, wide), {"tp": Shard(1)}),
        "b": gg.Input((wide, hidden), {"tp": Shard(0)}),
        "c": gg.Input((hidden,)),
        "dy": gg.Input(shape, sequence),
    }
    relation = {"y": sequence} | {f"grads.{key}": inputs[key].placement for key in ("x", "a", "b")}
    relation |= {"grads.g": {}, "grads.c": {}}
    return Case(f"sequence-{name}-{size}", block, distributed, {"tp": size}, inputs, relation)


def whole_ends_case(size):
    case = block_case("", gathers_only_inside, size)
    inputs = case.inputs | {key: gg.Input(case.inputs[key].shape) for key in ("x", "dy")}
    relation = case.relation | {"y": {}, "grads.x": {}}
    return Case(f"sequence-whole-ends-{size}", block, gathers_only_inside, {"tp": size}, inputs, relation)


def two_block_case(size):
    sequence = {"tp": Shard(0)}
    inputs = {"x": gg.Input((8, 3, 6), sequence), "t": gg.Input((8, 3, 6), sequence)}
    for layer, wide in (("1", 16), ("2", 24)):
        inputs |= {
            f"g{layer}": gg.Input((6,)),
            f"a{layer}": gg.Input((6, wide), {"tp": Shard(1)}),
            f"b{layer}": gg.Input((wide, 6), {"tp": Shard(0)}),
        }
    relation = {"loss": {}} | {f"grads.{key}": spec.placement for key, spec in inputs.items() if key != "t"}
    relation |= {"grads.g1": {}, "grads.g2": {}}
    return Case(f"sequence-two-blocks-{size}", two_blocks, two_split_blocks, {"tp": size}, inputs, relation)


def two_axis_case(dp, tp):
    case = block_case("", with_data_parallelism, tp)
    split = {"dp": Shard(1), "tp": Shard(0)}
    inputs = case.inputs | {key: gg.Input((8, 4, 6), split) for key in ("x", "dy")}
    relation = case.relation | {"y": split, "grads.x": split}
    name = f"sequence-with-data-{dp}x{tp}"
    return Case(name, block, with_data_parallelism, {"dp": dp, "tp": tp}, inputs, relation)


def correct(size):
    return [
        block_case("regions", by_regions, size),
        block_case("functional", by_functional_collectives, size),
        block_case("differentiable", by_differentiable_collectives, size),
        block_case("regathering", by_regathering, size),
        block_case("bucket", by_one_bucket, size),
        block_case("batch-first", batch_first, size, dim=1),
        whole_ends_case(size),
        two_block_case(size),
    ]


def faults():
    two, four = block_case("", by_regions, 2), block_case("", by_regions, 4)
    unsummed = "the bias has seen a part of the sequence only"
    sliced = "a slice of a gradient that is a partial sum"
    biased = "the bias is added on every rank before the sum"
    reverse = "the parts of the sequence are in reverse order"
    axis, shards = "not reduced over the parts of the sequence", "gradients of different shards are summed"
    everything, mixed = {"stated": ("*",)}, two_axis_case(2, 2)
    return [
        faulty(two, "sequence-fault-bias-gradient", bias_gradient_not_summed, unsummed, **everything),
        faulty(two, "sequence-fault-sliced-gradient", gather_with_sliced_gradient, sliced, **everything),
        faulty(four, "sequence-fault-no-sum", scattered_without_sum, "the product was scattered but never summed"),
        faulty(two, "sequence-fault-summed-twice", summed_before_reduce_scatter, "a total is summed once more"),
        faulty(four, "sequence-fault-early-bias", bias_before_reduce_scatter, biased, **everything),
        faulty(mixed, "sequence-fault-one-axis", norm_reduced_over_one_axis, axis, **everything),
        faulty(mixed, "sequence-fault-shards-summed", weights_reduced_over_all, shards, **everything),
        faulty(four, "sequence-fault-order", gathered_from_the_right, reverse, **everything),
    ]


CASES = [
    *[case for size in (2, 4, 8) for case in correct(size)],
    block_case("regions-one-column", by_regions, 8, wide=8, hidden=5),
    block_case("regions-uneven-width", by_regions, 4, wide=10),
    block_case("regathering-uneven-width", by_regathering, 4, wide=7),
    *[two_axis_case(dp, tp) for dp, tp in ((2, 1), (2, 2), (2, 4), (4, 2))],
    *faults(),
]
