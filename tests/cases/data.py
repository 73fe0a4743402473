"""Data parallelism: the batch is split over the ranks, and the gradients are summed or averaged."""

import torch
import torch.distributed as dist

import graphguard as gg
from cases.case import Case, faulty
from cases.regions import copy_to, gather_first, reduce_from, reduce_scatter_first
from graphguard import Partial, Shard

RATE = 0.125


def errors(x, t, w1, b1, w2):
    return (torch.tanh(x @ w1 + b1) @ w2 - t).square()


def gradients(loss, w1, b1, w2):
    return dict(zip(("w1", "b1", "w2"), torch.autograd.grad(loss, (w1, b1, w2)), strict=True))


def leaves(*tensors):
    return [tensor.requires_grad_() for tensor in tensors]


def summed(value, group=None):
    total = value.detach().clone()
    dist.all_reduce(total, group=group)
    return total


# ---------------------------------------------------------------------- sums and means
def sum_step(x, t, w1, b1, w2):
    leaves(w1, b1, w2)
    loss = errors(x, t, w1, b1, w2).sum()
    return {"loss": loss.detach(), "grads": gradients(loss, w1, b1, w2)}


def mean_step(x, t, w1, b1, w2):
    leaves(w1, b1, w2)
    loss = errors(x, t, w1, b1, w2).mean()
    return {"loss": loss.detach(), "grads": gradients(loss, w1, b1, w2)}


def split_sum_step(x, t, w1, b1, w2):
    out = sum_step(x, t, w1, b1, w2)
    for grad in out["grads"].values():
        dist.all_reduce(grad)
    return {"loss": summed(out["loss"]), "grads": out["grads"]}


def split_sum_step_with_local_loss(x, t, w1, b1, w2):
    out = sum_step(x, t, w1, b1, w2)
    for grad in out["grads"].values():
        dist.all_reduce(grad)
    return out


def bucketed_sum_step(x, t, w1, b1, w2):
    """As DDP does it: one asynchronous all-reduce of all gradients in a flat buffer."""
    out = sum_step(x, t, w1, b1, w2)
    bucket = torch.cat([grad.reshape(-1) for grad in out["grads"].values()])
    work = dist.all_reduce(bucket, async_op=True)
    loss = summed(out["loss"])
    work.wait()
    parts = bucket.split([grad.numel() for grad in out["grads"].values()])
    grads = {name: part.view_as(out["grads"][name]) for name, part in zip(out["grads"], parts, strict=True)}
    return {"loss": loss, "grads": grads}


def summed_then_divided_step(x, t, w1, b1, w2):
    out = mean_step(x, t, w1, b1, w2)
    size = dist.get_world_size()
    return {"loss": summed(out["loss"]) / size, "grads": {name: summed(g) / size for name, g in out["grads"].items()}}


def averaged_step(x, t, w1, b1, w2):
    out = mean_step(x, t, w1, b1, w2)
    for grad in out["grads"].values():
        dist.all_reduce(grad, op=dist.ReduceOp.AVG)
    return out


def scaled_loss_step(x, t, w1, b1, w2):
    """The loss is scaled before the backward, so that a sum of gradients is the mean."""
    leaves(w1, b1, w2)
    loss = errors(x, t, w1, b1, w2).mean() / dist.get_world_size()
    grads = gradients(loss, w1, b1, w2)
    return {"loss": summed(loss), "grads": {name: summed(grad) for name, grad in grads.items()}}


def globally_counted_step(x, t, w1, b1, w2):
    """Ranks may have unequal batches: sums are divided by the count of all."""
    leaves(w1, b1, w2)
    error = errors(x, t, w1, b1, w2)
    count = summed(torch.ones_like(error).sum())
    loss = error.sum() / count
    grads = gradients(loss, w1, b1, w2)
    return {"loss": summed(loss), "grads": {name: summed(grad) for name, grad in grads.items()}}


def summed_mean_step(x, t, w1, b1, w2):
    out = mean_step(x, t, w1, b1, w2)
    for grad in out["grads"].values():
        dist.all_reduce(grad)  # fault: mean gradients are summed
    return {"loss": summed(out["loss"]) / dist.get_world_size(), "grads": out["grads"]}


def unequal_means_step(x, t, w1, b1, w2):
    leaves(w1, b1, w2)
    error = errors(x, t, w1, b1, w2)
    grads = gradients(error.mean(), w1, b1, w2)
    for grad in grads.values():
        dist.all_reduce(grad, op=dist.ReduceOp.AVG)  # fault: means of unequal batches are averaged
    return {"loss": summed(error.sum()) / summed(torch.ones_like(error).sum()), "grads": grads}


# ---------------------------------------------------------------------- an update
def sgd_step(x, t, w1, b1, w2):
    grads = sum_step(x, t, w1, b1, w2)["grads"]
    with torch.no_grad():
        return {"w1": w1 - RATE * grads["w1"], "b1": b1 - RATE * grads["b1"], "w2": w2 - RATE * grads["w2"]}


def split_sgd_step(x, t, w1, b1, w2):
    grads = split_sum_step(x, t, w1, b1, w2)["grads"]
    with torch.no_grad():
        return {"w1": w1 - RATE * grads["w1"], "b1": b1 - RATE * grads["b1"], "w2": w2 - RATE * grads["w2"]}


def unsynchronised_bias_step(x, t, w1, b1, w2):
    grads = sum_step(x, t, w1, b1, w2)["grads"]
    dist.all_reduce(grads["w1"])
    dist.all_reduce(grads["w2"])
    with torch.no_grad():
        b1 = b1 - RATE * grads["b1"]  # fault: the gradient of the bias is not reduced
        return {"w1": w1 - RATE * grads["w1"], "b1": b1, "w2": w2 - RATE * grads["w2"]}


# ---------------------------------------------------------------------- gradient accumulation
def accumulating(count):
    def step(x, t, w1, b1, w2):
        leaves(w1, b1, w2)
        total = torch.zeros(())
        for part, target in zip(x.chunk(count), t.chunk(count), strict=True):
            loss = errors(part, target, w1, b1, w2).mean() / count
            loss.backward()
            total += loss.detach()
        for weight in (w1, b1, w2):
            dist.all_reduce(weight.grad, op=dist.ReduceOp.AVG)
        return {"loss": summed(total) / dist.get_world_size(), "grads": {"w1": w1.grad, "b1": b1.grad, "w2": w2.grad}}

    return step


def accumulating_sums(count):
    """Runs on one device too, where the microbatches are cut elsewhere."""

    def step(x, t, w1, b1, w2):
        leaves(w1, b1, w2)
        for part, target in zip(x.chunk(count), t.chunk(count), strict=True):
            errors(part, target, w1, b1, w2).sum().backward()
        if dist.is_initialized():
            for weight in (w1, b1, w2):
                dist.all_reduce(weight.grad)
        return {"grads": {"w1": w1.grad, "b1": b1.grad, "w2": w2.grad}}

    return step


def forgetful_accumulation(x, t, w1, b1, w2):
    leaves(w1, b1, w2)
    size, total = dist.get_world_size(), torch.zeros(())
    for part, target in zip(x.chunk(2), t.chunk(2), strict=True):
        loss = errors(part, target, w1, b1, w2).mean() / (2 * size)
        total += loss.detach()
        grads = gradients(loss, w1, b1, w2)
    for grad in grads.values():
        dist.all_reduce(grad)  # fault: holds the last microbatch only
    return {"loss": summed(total), "grads": grads}


def accumulation_averaged_each_time(x, t, w1, b1, w2):
    """Looks wrong and is right: an average of what is already equal changes nothing."""
    leaves(w1, b1, w2)
    total = torch.zeros(())
    for part, target in zip(x.chunk(2), t.chunk(2), strict=True):
        loss = errors(part, target, w1, b1, w2).mean() / 2
        loss.backward()
        total += loss.detach()
        for weight in (w1, b1, w2):
            dist.all_reduce(weight.grad, op=dist.ReduceOp.AVG)
    return {"loss": summed(total) / dist.get_world_size(), "grads": {"w1": w1.grad, "b1": b1.grad, "w2": w2.grad}}


def accumulation_summed_each_time(x, t, w1, b1, w2):
    leaves(w1, b1, w2)
    size, total = dist.get_world_size(), torch.zeros(())
    for part, target in zip(x.chunk(2), t.chunk(2), strict=True):
        loss = errors(part, target, w1, b1, w2).mean() / (2 * size)
        loss.backward()
        total += loss.detach()
        for weight in (w1, b1, w2):
            dist.all_reduce(weight.grad)  # fault: the running total is reduced again
    return {"loss": summed(total), "grads": {"w1": w1.grad, "b1": b1.grad, "w2": w2.grad}}


# ---------------------------------------------------------------------- sharded parameters
class GatheredWeight(torch.autograd.Function):
    """The whole parameter from its shards; its gradient is reduced and scattered, with the given operation."""

    @staticmethod
    def forward(ctx, shard, average):
        ctx.average = average
        return gather_first(shard, None)

    @staticmethod
    def backward(ctx, grad):
        shard = reduce_scatter_first(grad, None)
        return shard / dist.get_world_size() if ctx.average else shard, None


class GatheredWeightByAverage(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        return gather_first(shard, None)

    @staticmethod
    def backward(ctx, grad):
        shard = grad.new_empty(grad.size(0) // dist.get_world_size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(shard, grad.contiguous(), op=dist.ReduceOp.AVG)
        return shard


class GatheredWeightWithSlicedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        ctx.rows = shard.size(0)
        return gather_first(shard, None)

    @staticmethod
    def backward(ctx, grad):
        return grad.narrow(0, dist.get_rank() * ctx.rows, ctx.rows)  # fault: the gradient is sliced, not reduced


class GatheredWeightWithNeighboursGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        ctx.rows = shard.size(0)
        return gather_first(shard, None)

    @staticmethod
    def backward(ctx, grad):
        grad = summed(grad)
        owner = (dist.get_rank() + 1) % dist.get_world_size()
        return grad.narrow(0, owner * ctx.rows, ctx.rows)  # fault: the neighbour's shard of the gradient


def fully_sharded(gathered, average):
    def step(x, t, w1, b1, w2):
        leaves(w1, b1, w2)
        error = errors(x, t, gathered(w1), gathered(b1), gathered(w2))
        loss = error.mean() if average else error.sum()
        total = summed(loss) / dist.get_world_size() if average else summed(loss)
        return {"loss": total, "grads": gradients(loss, w1, b1, w2)}

    return step


def unpacked(flat, features, hidden, out):
    w1, b1, w2 = flat.split([features * hidden, hidden, hidden * out])
    return w1.view(features, hidden), b1, w2.view(hidden, out)


def flat_step(hidden):
    def step(x, t, flat):
        leaves(flat)
        loss = errors(x, t, *unpacked(flat, x.size(1), hidden, t.size(1))).sum()
        return {"loss": loss.detach(), "grads": {"flat": torch.autograd.grad(loss, flat)[0]}}

    return step


def flat_sharded_step(hidden, length):
    """One flat parameter, cut without regard to what is in it; shards are padded to equal sizes on the wire."""

    def step(x, t, flat):
        size = -(-length // dist.get_world_size())
        padded = torch.nn.functional.pad(flat, (0, size - flat.numel()))
        whole = gather_first(padded, None)[:length].requires_grad_()
        loss = errors(x, t, *unpacked(whole, x.size(1), hidden, t.size(1))).sum()
        grad = torch.autograd.grad(loss, whole)[0]
        grad = torch.nn.functional.pad(grad, (0, size * dist.get_world_size() - length))
        return {"loss": summed(loss), "grads": {"flat": reduce_scatter_first(grad, None)[: flat.numel()]}}

    return step


def hybrid_sharded_step(x, t, w1, b1, w2, mesh):
    """Parameters are sharded inside a node and replicated across nodes."""
    node, local = mesh["node"].get_group(), mesh["local"].get_group()
    out = sum_step(x, t, gather_first(w1, local), gather_first(b1, local), gather_first(w2, local))
    grads = {name: reduce_scatter_first(grad, local) for name, grad in out["grads"].items()}
    for grad in grads.values():
        dist.all_reduce(grad, group=node)
    return {"loss": summed(out["loss"]), "grads": grads}


# ---------------------------------------------------------------------- data and tensor parallelism
def mean_step_with_input(x, t, w1, b1, w2):
    leaves(x, w1, b1, w2)
    loss = errors(x, t, w1, b1, w2).mean()
    grads = dict(zip(("x", "w1", "b1", "w2"), torch.autograd.grad(loss, (x, w1, b1, w2)), strict=True))
    return {"loss": loss.detach(), "grads": grads}


def two_axes(x, t, w1, b1, w2, mesh):
    """The mean over the local batch, and its gradients."""
    leaves(x, w1, b1, w2)
    tp = mesh["tp"].get_group()
    out = reduce_from(torch.tanh(copy_to(x, tp) @ w1 + b1) @ w2, tp)
    loss = (out - t).square().mean()
    grads = dict(zip(("x", "w1", "b1", "w2"), torch.autograd.grad(loss, (x, w1, b1, w2)), strict=True))
    return loss.detach(), grads


def two_axes_step(x, t, w1, b1, w2, mesh):
    dp, size = mesh["dp"].get_group(), mesh["dp"].size()
    loss, grads = two_axes(x, t, w1, b1, w2, mesh)
    for name in ("w1", "b1", "w2"):
        dist.all_reduce(grads[name], group=dp)
    return {"loss": summed(loss, dp) / size, "grads": {name: grad / size for name, grad in grads.items()}}


def wrong_axis_step(x, t, w1, b1, w2, mesh):
    dp, tp, size = mesh["dp"].get_group(), mesh["tp"].get_group(), mesh["dp"].size()
    loss, grads = two_axes(x, t, w1, b1, w2, mesh)
    dist.all_reduce(grads["w1"], group=dp)
    dist.all_reduce(grads["w2"], group=dp)
    dist.all_reduce(grads["b1"], group=tp)  # fault: the bias gradient is reduced over the other axis
    return {"loss": summed(loss, dp) / size, "grads": {name: grad / size for name, grad in grads.items()}}


def wrong_size_step(x, t, w1, b1, w2, mesh):
    dp, size = mesh["dp"].get_group(), mesh["dp"].size()
    loss, grads = two_axes(x, t, w1, b1, w2, mesh)
    for name in ("w1", "b1", "w2"):
        dist.all_reduce(grads[name], group=dp)
        grads[name] /= mesh["tp"].size()  # fault: divided by the size of the other axis
    grads["x"] /= size
    return {"loss": summed(loss, dp) / size, "grads": grads}


# ---------------------------------------------------------------------- reductions in steps
def inside_then_across(x, t, w1, b1, w2, mesh):
    out = sum_step(x, t, w1, b1, w2)
    for value in (out["loss"], *out["grads"].values()):
        dist.all_reduce(value, group=mesh["local"].get_group())
        dist.all_reduce(value, group=mesh["node"].get_group())
    return out


def scattered_across_gathered(x, t, w1, b1, w2, mesh):
    """Each rank of a node reduces its share across nodes, so that the slow links carry less."""
    node, local = mesh["node"].get_group(), mesh["local"].get_group()
    out = sum_step(x, t, w1, b1, w2)
    flat = torch.cat([value.reshape(-1) for value in (out["loss"], *out["grads"].values())])
    length = flat.numel()
    share = reduce_scatter_first(torch.nn.functional.pad(flat, (0, -length % mesh["local"].size())), local)
    dist.all_reduce(share, group=node)
    loss, *grads = gather_first(share, local)[:length].split([1, w1.numel(), b1.numel(), w2.numel()])
    grads = dict(zip(("w1", "b1", "w2"), grads, strict=True))
    return {"loss": loss.view(()), "grads": {name: grad.view_as(out["grads"][name]) for name, grad in grads.items()}}


def subgroups_then_heads(x, t, w1, b1, w2):
    """Pairs reduce to their first rank, the first ranks reduce, and the result is sent back to the pairs."""
    out = sum_step(x, t, w1, b1, w2)
    rank, size = dist.get_rank(), dist.get_world_size()
    pair, _ = dist.new_subgroups(2)
    heads = dist.new_group(list(range(0, size, 2)))
    for value in (out["loss"], *out["grads"].values()):
        dist.reduce(value, group_dst=0, group=pair)
        if rank % 2 == 0:
            dist.all_reduce(value, group=heads)
        dist.broadcast(value, group_src=0, group=pair)
    return out


def averaged_twice(x, t, w1, b1, w2, mesh):
    out = mean_step(x, t, w1, b1, w2)
    for value in (out["loss"], *out["grads"].values()):
        dist.all_reduce(value, op=dist.ReduceOp.AVG, group=mesh["local"].get_group())
        dist.all_reduce(value, op=dist.ReduceOp.AVG, group=mesh["node"].get_group())
    return out


def inside_only(x, t, w1, b1, w2, mesh):
    out = sum_step(x, t, w1, b1, w2)
    for value in (out["loss"], *out["grads"].values()):
        dist.all_reduce(value, group=mesh["local"].get_group())  # fault: never reduced across nodes
    return out


def inside_then_everywhere(x, t, w1, b1, w2, mesh):
    out = sum_step(x, t, w1, b1, w2)
    for value in (out["loss"], *out["grads"].values()):
        dist.all_reduce(value, group=mesh["local"].get_group())
        dist.all_reduce(value)  # fault: sums of a node are summed again
    return out


# ---------------------------------------------------------------------- cases
WHOLE = {"loss": {}, "grads.w1": {}, "grads.b1": {}, "grads.w2": {}}
MEAN_OF_LOSSES = WHOLE | {"loss": {"dp": Partial("avg")}}


def split_batch(batch, placement, features=5, hidden=7, out=3):
    return {
        "x": gg.Input((batch, features), placement),
        "t": gg.Input((batch, out), placement),
        "w1": gg.Input((features, hidden)),
        "b1": gg.Input((hidden,)),
        "w2": gg.Input((hidden, out)),
    }


def plain(name, sequential, distributed, size, batch=8, relation=WHOLE, outputs=None):
    inputs = split_batch(batch, {"dp": Shard(0)})
    return Case(f"data-{name}", sequential, distributed, {"dp": size}, inputs, relation, outputs or {})


def sharded(name, distributed, size, average):
    """Every parameter is cut on its first dim."""
    inputs = split_batch(8, {"dp": Shard(0)}, features=16, hidden=24)
    inputs |= {key: gg.Input(inputs[key].shape, {"dp": Shard(0)}) for key in ("w1", "b1", "w2")}
    relation = {"loss": {}} | {f"grads.{key}": {"dp": Shard(0)} for key in ("w1", "b1", "w2")}
    return Case(f"data-{name}", mean_step if average else sum_step, distributed, {"dp": size}, inputs, relation)


def flat_sharded(name, size, hidden):
    length = 5 * hidden + hidden + hidden * 3
    inputs = split_batch(8, {"dp": Shard(0)})
    inputs = {"x": inputs["x"], "t": inputs["t"], "flat": gg.Input((length,), {"dp": Shard(0)})}
    programs = flat_step(hidden), flat_sharded_step(hidden, length)
    return Case(f"data-{name}", *programs, {"dp": size}, inputs, {"loss": {}, "grads.flat": {"dp": Shard(0)}})


def on_two_axes(name, distributed, dp, tp, hidden=8):
    inputs = split_batch(4 if dp == 4 else 6, {"dp": Shard(0)}, hidden=hidden)
    split = {"w1": {"tp": Shard(1)}, "b1": {"tp": Shard(0)}, "w2": {"tp": Shard(0)}}
    inputs |= {key: gg.Input(inputs[key].shape, placement) for key, placement in split.items()}
    relation = {"loss": {}, "grads.x": {"dp": Shard(0)}} | {f"grads.{key}": placement for key, placement in split.items()}
    return Case(f"data-{name}", mean_step_with_input, distributed, {"dp": dp, "tp": tp}, inputs, relation)


def hierarchical(name, distributed, node, local, sequential=sum_step, batch=8):
    inputs = split_batch(batch, {"node": Shard(0), "local": Shard(0)})
    return Case(f"data-{name}", sequential, distributed, {"node": node, "local": local}, inputs, WHOLE)


def hybrid_sharded(size):
    inputs = split_batch(8, {"node": Shard(0), "local": Shard(0)}, features=16, hidden=24)
    inputs |= {key: gg.Input(inputs[key].shape, {"local": Shard(0)}) for key in ("w1", "b1", "w2")}
    relation = {"loss": {}} | {f"grads.{key}": {"local": Shard(0)} for key in ("w1", "b1", "w2")}
    return Case(f"data-hsdp-{size}", sum_step, hybrid_sharded_step, {"node": 2, "local": size // 2}, inputs, relation)


def correct(size):
    local_losses = {"loss": {"dp": Partial()}}
    mean_losses = {"loss": {"dp": Partial("avg")}}
    by_average = fully_sharded(GatheredWeightByAverage.apply, average=True)
    return [
        plain(f"sum-{size}", sum_step, split_sum_step, size),
        plain(f"sum-of-local-losses-{size}", sum_step, split_sum_step_with_local_loss, size, relation=WHOLE | local_losses),
        plain(f"bucket-{size}", sum_step, bucketed_sum_step, size),
        plain(f"mean-{size}", mean_step, summed_then_divided_step, size),
        plain(f"average-{size}", mean_step, averaged_step, size, relation=MEAN_OF_LOSSES, outputs=mean_losses),
        plain(f"scaled-loss-{size}", mean_step, scaled_loss_step, size),
        plain(f"global-count-{size}", mean_step, globally_counted_step, size),
        plain(f"accumulate-mean-{size}", mean_step, accumulating(2), size, batch=16),
        sharded(f"fsdp-sum-{size}", fully_sharded(lambda w: GatheredWeight.apply(w, False), average=False), size, False),
        sharded(f"fsdp-mean-{size}", fully_sharded(lambda w: GatheredWeight.apply(w, True), average=True), size, True),
        sharded(f"fsdp-average-{size}", by_average, size, True),
        flat_sharded(f"fsdp-flat-{size}", size, hidden=8),
        hybrid_sharded(size),
        hierarchical(f"hierarchical-{size}", inside_then_across, 2, size // 2),
        hierarchical(f"hierarchical-scatter-{size}", scattered_across_gathered, 2, size // 2),
        hierarchical(f"hierarchical-average-{size}", averaged_twice, 2, size // 2, mean_step),
        plain(f"subgroups-{size}", sum_step, subgroups_then_heads, size),
    ]


def uneven_and_accumulated():
    accumulated = {path: {} for path in WHOLE if path != "loss"}
    return [
        plain("sum-uneven-4", sum_step, split_sum_step, 4, batch=7),
        plain("sum-idle-rank-4", sum_step, split_sum_step, 4, batch=6),
        plain("global-count-uneven-4", mean_step, globally_counted_step, 4, batch=7),
        plain("global-count-uneven-2", mean_step, globally_counted_step, 2, batch=5),
        flat_sharded("fsdp-flat-uneven-4", 4, hidden=7),
        hierarchical("hierarchical-uneven-4", inside_then_across, 2, 2, batch=7),
        plain("accumulate-average-4", mean_step, accumulation_averaged_each_time, 4, batch=16),
        plain("accumulate-sums-2", accumulating_sums(4), accumulating_sums(2), 2, relation=accumulated),
        plain("accumulate-sums-4", accumulating_sums(3), accumulating_sums(2), 4, batch=15, relation=accumulated),
    ]


def two_axis_cases():
    sizes = [(1, 2), (2, 1), (2, 2), (4, 2), (2, 4)]
    cases = [on_two_axes(f"tensor-{dp}x{tp}", two_axes_step, dp, tp) for dp, tp in sizes]
    return [*cases, on_two_axes("tensor-uneven-2x4", two_axes_step, 2, 4, hidden=10)]


def faults():
    mean, node = plain("", mean_step, averaged_step, 4), hierarchical("", inside_then_across, 2, 2)
    mixed = on_two_axes("", two_axes_step, 4, 2)
    updated = plain("", sgd_step, split_sgd_step, 2, relation={"w1": {}, "b1": {}, "w2": {}})
    accumulated = plain("", mean_step, accumulating(2), 4, batch=16)
    whole = sharded("", split_sum_step, 2, False)
    sliced = fully_sharded(GatheredWeightWithSlicedGradient.apply, average=False)
    shifted = fully_sharded(GatheredWeightWithNeighboursGradient.apply, average=False)
    unequal = {"inputs": split_batch(7, {"dp": Shard(0)})}
    stated = ("grads.w1", "grads.b1", "grads.w2")
    return [
        faulty(mean, "data-fault-summed-means", summed_mean_step, "mean gradients are summed", stated=stated),
        faulty(
            mean,
            "data-fault-unequal-means",
            unequal_means_step,
            "means of unequal batches are averaged",
            stated=stated,
            **unequal,
        ),
        faulty(
            updated,
            "data-fault-unreduced-bias",
            unsynchronised_bias_step,
            "the gradient of the bias is not reduced",
            stated=("*",),
        ),
        faulty(accumulated, "data-fault-last-microbatch", forgetful_accumulation, "holds the last microbatch only"),
        faulty(accumulated, "data-fault-reduced-again", accumulation_summed_each_time, "the running total is reduced again"),
        faulty(whole, "data-fault-sliced-gradient", sliced, "the gradient is sliced, not reduced"),
        faulty(whole, "data-fault-neighbour", shifted, "the neighbour's shard of the gradient", stated=stated),
        faulty(
            mixed, "data-fault-wrong-axis", wrong_axis_step, "the bias gradient is reduced over the other axis", stated=("*",)
        ),
        faulty(mixed, "data-fault-wrong-size", wrong_size_step, "divided by the size of the other axis", stated=("*",)),
        faulty(node, "data-fault-inside-only", inside_only, "never reduced across nodes", stated=("*",)),
        faulty(node, "data-fault-summed-twice", inside_then_everywhere, "sums of a node are summed again"),
    ]


CASES = [
    *[case for size in (2, 4, 8) for case in correct(size)],
    plain("sgd-2", sgd_step, split_sgd_step, 2, relation={"w1": {}, "b1": {}, "w2": {}}),
    plain("sgd-8", sgd_step, split_sgd_step, 8, relation={"w1": {}, "b1": {}, "w2": {}}),
    *uneven_and_accumulated(),
    *two_axis_cases(),
    *faults(),
]
