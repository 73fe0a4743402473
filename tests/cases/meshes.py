"""Meshes of several axes: data, pipeline, context and tensor parallelism together, and reductions in steps."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.regions import copy_to, gather_first, reduce_from, reduce_scatter_first
from graphguard import Input, Shard

BATCH, SEQUENCE, FEATURES, HIDDEN, LAYERS, MICROBATCHES = 8, 4, 3, 4, 4, 2


def leaves(*tensors):
    return [tensor.detach().requires_grad_() for tensor in tensors]


# ---------------------------------------------------------------------- data x pipeline x tensor
def deep_step(x, target, up, down):
    """Layers of two matrices, stacked; a residual stream."""
    up, down = leaves(up, down)
    h = x
    for a, b in zip(up, down, strict=True):
        h = h + torch.tanh(h @ a) @ b
    loss = F.mse_loss(h, target)
    loss.backward()
    return {"loss": loss.detach(), "up": up.grad, "down": down.grad}


class Grid:
    """A rank's groups and neighbours."""

    def __init__(self, mesh):
        self.dp, self.tp = mesh["dp"].get_group(), mesh["tp"].get_group()
        self.replicas = mesh["dp"].size()
        stages = mesh["pp"].get_group()
        self.stage, self.stages = dist.get_rank(stages), dist.get_world_size(stages)
        self.first, self.last = self.stage == 0, self.stage == self.stages - 1
        self.before = None if self.first else dist.get_global_rank(stages, self.stage - 1)
        self.after = None if self.last else dist.get_global_rank(stages, self.stage + 1)

    def layer(self, h, a, b):
        return h + reduce_from(torch.tanh(copy_to(h, self.tp) @ a) @ b, self.tp)


def deep_pipeline(x, target, up, down, mesh, grid=Grid, scale=MICROBATCHES, finish=None):
    """GPipe with tensor-parallel layers; the gradients are averaged over the replicas."""
    at = grid(mesh)
    up, down = leaves(up, down)
    flights, total = [], torch.zeros(())
    for each, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        received = None
        h = each
        if not at.first:
            received = torch.empty_like(each)
            dist.recv(received, at.before)
            h = received.requires_grad_()
        for a, b in zip(up, down, strict=True):
            h = at.layer(h, a, b)
        if at.last:
            h = F.mse_loss(h, wanted) / scale
            total = total + h.detach()
        else:
            dist.send(h.detach(), at.after)
        flights.append((received, h))
    for received, h in flights:
        grad = None
        if not at.last:
            grad = torch.empty_like(h)
            dist.recv(grad, at.after)
        h.backward(grad)
        if received is not None:
            dist.send(received.grad, at.before)
    return (finish or averaged_over_replicas)(at, total, up.grad, down.grad)


def averaged_over_replicas(at, total, up, down):
    for value in (total, up, down):
        dist.all_reduce(value, op=dist.ReduceOp.AVG, group=at.dp)
    return {"loss": total if at.last else None, "up": up, "down": down}


def with_grid(grid=Grid, **options):
    def step(x, target, up, down, mesh):
        return deep_pipeline(x, target, up, down, mesh, grid, **options)

    return step


class GridWithoutCopy(Grid):
    def layer(self, h, a, b):
        return h + reduce_from(torch.tanh(h @ a) @ b, self.tp)  # fault: the gradient of the input is not summed over tp


def loss_averaged_only(at, total, up, down):
    dist.all_reduce(total, op=dist.ReduceOp.AVG, group=at.dp)
    dist.all_reduce(up, op=dist.ReduceOp.AVG, group=at.dp)
    return {"loss": total if at.last else None, "up": up, "down": down / at.replicas}  # fault: not reduced over replicas


def averaged_over_tensor_ranks(at, total, up, down):
    dist.all_reduce(total, op=dist.ReduceOp.AVG, group=at.dp)
    for value in (up, down):
        dist.all_reduce(value, group=at.dp)
        value /= dist.get_world_size(at.tp) * at.replicas  # fault: divided by the tensor ranks too
    return {"loss": total if at.last else None, "up": up, "down": down}


# ---------------------------------------------------------------------- data x context x tensor
def attended(x, wq, wk, wv, wo, heads):
    """x: [batch, sequence, features]; causal."""
    q, k, v = ((x @ w).unflatten(-1, (heads, -1)).transpose(1, 2) for w in (wq, wk, wv))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ wo


def attention_step(x, target, wq, wk, wv, wo):
    wq, wk, wv, wo = leaves(wq, wk, wv, wo)
    loss = F.mse_loss(attended(x, wq, wk, wv, wo, HEADS), target)
    names = ("wq", "wk", "wv", "wo")
    return {"loss": loss.detach(), **dict(zip(names, torch.autograd.grad(loss, (wq, wk, wv, wo)), strict=True))}


HEADS, HEAD = 4, 2


class GatherAlong(torch.autograd.Function):
    """Gathers a dim over a group; the gradients are summed and scattered."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return gather_first(x.movedim(dim, 0), group).movedim(0, dim)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_first(grad.movedim(ctx.dim, 0), ctx.group).movedim(0, ctx.dim), None, None


def three_axes(x, target, wq, wk, wv, wo, mesh, start=None):
    """The batch over dp, the sequence over cp, the heads over tp: the mean of the local errors and its gradients."""
    cp, tp = mesh["cp"].get_group(), mesh["tp"].get_group()
    wq, wk, wv, wo = leaves(wq, wk, wv, wo)
    h = copy_to(x, tp)
    q, k, v = ((h @ w).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (wq, wk, wv))
    k, v = GatherAlong.apply(k, 2, cp), GatherAlong.apply(v, 2, cp)
    first = (mesh["cp"].get_local_rank() if start is None else start(mesh)) * x.size(1)
    seen = (first + torch.arange(x.size(1)))[:, None] >= torch.arange(k.size(2))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2) @ wo
    loss = F.mse_loss(reduce_from(out, tp), target)
    return loss.detach(), torch.autograd.grad(loss, (wq, wk, wv, wo))


NAMES = ("wq", "wk", "wv", "wo")


def three_axes_step(x, target, wq, wk, wv, wo, mesh):
    """The means are averaged over both axes that split the tokens."""
    loss, grads = three_axes(x, target, wq, wk, wv, wo, mesh)
    for axis in ("dp", "cp"):
        for value in (loss, *grads):
            dist.all_reduce(value, op=dist.ReduceOp.AVG, group=mesh[axis].get_group())
    return {"loss": loss, **dict(zip(NAMES, grads, strict=True))}


def three_axes_flat_step(x, target, wq, wk, wv, wo, mesh):
    """One group for both axes, which is not contiguous, and one buffer for all gradients."""
    loss, grads = three_axes(x, target, wq, wk, wv, wo, mesh)
    tokens = mesh["dp", "cp"]._flatten("tokens").get_group()
    flat = torch.cat([loss.reshape(1), *(grad.flatten() for grad in grads)]) / dist.get_world_size(tokens)
    dist.all_reduce(flat, group=tokens)
    loss, *parts = flat.split([1, *(grad.numel() for grad in grads)])
    grads = [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)]
    return {"loss": loss.view(()), **dict(zip(NAMES, grads, strict=True))}


def only_over_data(x, target, wq, wk, wv, wo, mesh):
    loss, grads = three_axes(x, target, wq, wk, wv, wo, mesh)
    for value in (loss, *grads):
        dist.all_reduce(value, op=dist.ReduceOp.AVG, group=mesh["dp"].get_group())
    dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=mesh["cp"].get_group())
    grads = [grad / mesh["cp"].size() for grad in grads]  # fault: the gradients are not reduced over cp
    return {"loss": loss, **dict(zip(NAMES, grads, strict=True))}


def position_of_another_axis(mesh):
    return mesh["tp"].get_local_rank()  # fault: the position on another axis


def masked_by_another_axis(x, target, wq, wk, wv, wo, mesh):
    loss, grads = three_axes(x, target, wq, wk, wv, wo, mesh, position_of_another_axis)
    for axis in ("dp", "cp"):
        for value in (loss, *grads):
            dist.all_reduce(value, op=dist.ReduceOp.AVG, group=mesh[axis].get_group())
    return {"loss": loss, **dict(zip(NAMES, grads, strict=True))}


def summed_over_context(x, target, wq, wk, wv, wo, mesh):
    loss, grads = three_axes(x, target, wq, wk, wv, wo, mesh)
    for value in (loss, *grads):
        dist.all_reduce(value, op=dist.ReduceOp.AVG, group=mesh["dp"].get_group())
        dist.all_reduce(value, group=mesh["cp"].get_group())  # fault: means over parts of the sequence are summed
    return {"loss": loss, **dict(zip(NAMES, grads, strict=True))}


# ---------------------------------------------------------------------- reductions of one gradient
def weight_gradient(x, w):
    """The gradient of the mean of squares."""
    (w,) = leaves(w)
    return torch.autograd.grad((x @ w).square().mean(), w)[0]


def averaged(x, w):
    grad = weight_gradient(x, w)
    dist.all_reduce(grad, op=dist.ReduceOp.AVG)
    return grad


def multiplied_before(x, w):
    """Multiplied before the sum, so that the sum does not overflow in half precision."""
    grad = weight_gradient(x, w) * (1 / dist.get_world_size())
    dist.all_reduce(grad)
    return grad


def premultiplied(x, w):
    """The library multiplies what each rank has, and sums."""
    grad = weight_gradient(x, w)
    dist.all_reduce(grad, op=dist._make_nccl_premul_sum(1 / dist.get_world_size()))
    return grad


def divided_in_two_steps(x, w):
    """By a root before and after, as DDP's hooks do it: 2 before, the rest after."""
    grad = weight_gradient(x, w) / 2
    dist.all_reduce(grad)
    return grad / (dist.get_world_size() / 2)


def reduced_then_gathered(x, w):
    return gather_first(reduce_scatter_first(weight_gradient(x, w) / dist.get_world_size(), None), None)


def averaged_and_gathered(x, w):
    grad = weight_gradient(x, w)
    part = grad.new_empty(grad.size(0) // dist.get_world_size(), grad.size(1))
    dist.reduce_scatter_tensor(part, grad, op=dist.ReduceOp.AVG)
    return gather_first(part, None)


def strided_groups(x, w):
    """Ranks 0, 2, ... and 1, 3, ... first, then the pairs: groups that are not contiguous."""
    rank, size = dist.get_rank(), dist.get_world_size()
    across = [dist.new_group(list(range(first, size, 2))) for first in range(2)][rank % 2]
    pair = [dist.new_group([first, first + 1]) for first in range(0, size, 2)][rank // 2]
    grad = weight_gradient(x, w) / size
    dist.all_reduce(grad, group=across)
    dist.all_reduce(grad, group=pair)
    return grad


def shuffled_groups(x, w):
    """Reduce-scatter and all-gather in a group whose order is not that of the ranks."""
    size = dist.get_world_size()
    order = [*range(1, size, 2), *range(0, size, 2)]
    group = dist.new_group(order)
    return gather_first(reduce_scatter_first(weight_gradient(x, w) / size, group), group)


def hierarchical(x, w, mesh):
    """Reduce-scatter inside, all-reduce across, all-gather inside."""
    inside, across = mesh["inner"].get_group(), mesh["outer"].get_group()
    grad = weight_gradient(x, w) / dist.get_world_size()
    part = reduce_scatter_first(grad, inside)
    dist.all_reduce(part, group=across)
    return gather_first(part, inside)


def hierarchical_in_full(x, w, mesh):
    """Scattered over both axes, gathered over both in the other order."""
    inside, across = mesh["inner"].get_group(), mesh["outer"].get_group()
    part = reduce_scatter_first(reduce_scatter_first(weight_gradient(x, w) / dist.get_world_size(), inside), across)
    return gather_first(gather_first(part, across), inside)


def hierarchical_reduce_broadcast(x, w, mesh):
    """To one rank of each node, between those, and back."""
    inside, across = mesh["inner"].get_group(), mesh["outer"].get_group()
    grad = weight_gradient(x, w) / dist.get_world_size()
    dist.reduce(grad, group_dst=0, group=inside)
    if mesh["inner"].get_local_rank() == 0:
        dist.all_reduce(grad, group=across)
    dist.broadcast(grad, group_src=0, group=inside)
    return grad


def functional(x, w):
    return funcol.all_reduce(weight_gradient(x, w), "avg", dist.group.WORLD).clone()


def three_gradients(x, w):
    """The gradients of three powers, as a program with several parameters has them."""
    return [weight_gradient(x, w), weight_gradient(x * 2, w), weight_gradient(x + 1, w)]


def one_by_one(x, w):
    return dict(zip("abc", three_gradients(x, w), strict=True))


def coalesced(x, w):
    grads = three_gradients(x, w)
    with dist._coalescing_manager():
        for grad in grads:
            dist.all_reduce(grad)
    return dict(zip("abc", [grad / dist.get_world_size() for grad in grads], strict=True))


def coalesced_function(x, w):
    grads = funcol.all_reduce_coalesced(three_gradients(x, w), "avg", dist.group.WORLD)
    return dict(zip("abc", [grad.clone() for grad in grads], strict=True))


def asynchronous(x, w):
    grads = three_gradients(x, w)
    for work in [dist.all_reduce(grad, op=dist.ReduceOp.AVG, async_op=True) for grad in grads]:
        work.wait()
    return dict(zip("abc", grads, strict=True))


def flattened(x, w):
    grads = three_gradients(x, w)
    flat = torch._utils._flatten_dense_tensors(grads)
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    return dict(zip("abc", torch._utils._unflatten_dense_tensors(flat, grads), strict=True))


# ---------------------------------------------------------------------- faults of reductions
def divided_by_inner(x, w, mesh):
    inside, across = mesh["inner"].get_group(), mesh["outer"].get_group()
    grad = weight_gradient(x, w) / mesh["inner"].size()  # fault: divided by the ranks of one node
    part = reduce_scatter_first(grad, inside)
    dist.all_reduce(part, group=across)
    return gather_first(part, inside)


def gathered_across(x, w, mesh):
    inside, across = mesh["inner"].get_group(), mesh["outer"].get_group()
    grad = weight_gradient(x, w) / dist.get_world_size()
    part = reduce_scatter_first(grad, inside)
    dist.all_reduce(part, group=across)
    return gather_first(part, across)  # fault: gathered over the other axis


def never_across(x, w, mesh):
    inside = mesh["inner"].get_group()
    grad = weight_gradient(x, w) / mesh["inner"].size()
    part = reduce_scatter_first(grad, inside)  # fault: nodes do not meet
    return gather_first(part, inside)


def gathered_in_another_order(x, w):
    size = dist.get_world_size()
    order = dist.new_group([*range(1, size, 2), *range(0, size, 2)])
    part = reduce_scatter_first(weight_gradient(x, w) / size, dist.new_group(list(range(size))))
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part, group=order)
    ranks = dist.get_process_group_ranks(order)
    return torch.cat([parts[rank] for rank in ranks[1:] + ranks[:1]])  # fault: parts are put together in a wrong order


def scattered_in_full_and_gathered_in_the_same_order(x, w, mesh):
    inside, across = mesh["inner"].get_group(), mesh["outer"].get_group()
    part = reduce_scatter_first(reduce_scatter_first(weight_gradient(x, w) / dist.get_world_size(), inside), across)
    return gather_first(gather_first(part, inside), across)  # fault: gathered in the order of scattering


def averaged_and_divided(x, w):
    grad = weight_gradient(x, w) / dist.get_world_size()
    dist.all_reduce(grad, op=dist.ReduceOp.AVG)  # fault: averaged after a division
    return grad


def overlapping_groups(x, w):
    rank, size = dist.get_rank(), dist.get_world_size()
    half = [dist.new_group(list(range(size // 2))), dist.new_group(list(range(size // 2, size)))][rank >= size // 2]
    pair = [dist.new_group([first, first + 1]) for first in range(0, size, 2)][rank // 2]
    grad = weight_gradient(x, w) / size
    dist.all_reduce(grad, group=half)
    dist.all_reduce(grad, group=pair)  # fault: the pairs lie inside of the halves
    return grad


# ---------------------------------------------------------------------- cases
def deep(name, distributed, dp, pp, tp):
    inputs = {
        "x": Input((BATCH, FEATURES), {"dp": Shard(0)}),
        "target": Input((BATCH, FEATURES), {"dp": Shard(0)}),
        "up": Input((LAYERS, FEATURES, HIDDEN), {"pp": Shard(0), "tp": Shard(2)}),
        "down": Input((LAYERS, HIDDEN, FEATURES), {"pp": Shard(0), "tp": Shard(1)}),
    }
    relation = {"loss": {}, "up": inputs["up"].placement, "down": inputs["down"].placement}
    return Case(f"meshes-{name}", deep_step, distributed, {"dp": dp, "pp": pp, "tp": tp}, inputs, relation)


def attentive(name, distributed, dp, cp, tp):
    width = HEADS * HEAD
    tokens = {"dp": Shard(0), "cp": Shard(1)}
    inputs = {
        "x": Input((4, SEQUENCE, FEATURES), tokens),
        "target": Input((4, SEQUENCE, FEATURES), tokens),
        **{key: Input((FEATURES, width), {"tp": Shard(1)}) for key in ("wq", "wk", "wv")},
        "wo": Input((width, FEATURES), {"tp": Shard(0)}),
    }
    relation = {"loss": {}, **{key: inputs[key].placement for key in NAMES}}
    return Case(f"meshes-{name}", attention_step, distributed, {"dp": dp, "cp": cp, "tp": tp}, inputs, relation)


def flat(name, distributed, size, sequential=weight_gradient, paths=("out",)):
    inputs = {"x": Input((16, 8), {"dp": Shard(0)}), "w": Input((8, 3))}
    return Case(f"meshes-{name}", sequential, distributed, {"dp": size}, inputs, {path: {} for path in paths})


def nested(name, distributed, outer, inner):
    rows = {"outer": Shard(0), "inner": Shard(0)}
    inputs = {"x": Input((16, 8), rows), "w": Input((8, 3))}
    return Case(f"meshes-{name}", weight_gradient, distributed, {"outer": outer, "inner": inner}, inputs, {"out": {}})


def correct(size):
    three = {"sequential": one_by_one, "paths": ("a", "b", "c")}
    return [
        flat(f"averaged-{size}", averaged, size),
        flat(f"multiplied-before-{size}", multiplied_before, size),
        flat(f"premultiplied-{size}", premultiplied, size),
        flat(f"divided-in-two-steps-{size}", divided_in_two_steps, size),
        flat(f"reduced-then-gathered-{size}", reduced_then_gathered, size),
        flat(f"averaged-and-gathered-{size}", averaged_and_gathered, size),
        flat(f"strided-groups-{size}", strided_groups, size),
        flat(f"shuffled-groups-{size}", shuffled_groups, size),
        flat(f"functional-{size}", functional, size),
        flat(f"coalesced-{size}", coalesced, size, **three),
        flat(f"coalesced-function-{size}", coalesced_function, size, **three),
        flat(f"asynchronous-{size}", asynchronous, size, **three),
        flat(f"flattened-{size}", flattened, size, **three),
        nested(f"hierarchical-{size}", hierarchical, 2, size // 2),
        nested(f"hierarchical-wide-{size}", hierarchical, size // 2, 2),
        nested(f"hierarchical-in-full-{size}", hierarchical_in_full, 2, size // 2),
        nested(f"hierarchical-reduce-broadcast-{size}", hierarchical_reduce_broadcast, 2, size // 2),
    ]


def faults():
    node, one = nested("", None, 2, 2), flat("", None, 4)
    wide, grid = deep("", None, 2, 2, 2), attentive("", None, 2, 2, 2)
    small = attentive("", None, 1, 2, 2)
    every = {"stated": ("*",)}
    return [
        faulty(node, "meshes-fault-divided-by-inner", divided_by_inner, "divided by the ranks of one node", **every),
        faulty(node, "meshes-fault-gathered-across", gathered_across, "gathered over the other axis", **every),
        faulty(node, "meshes-fault-never-across", never_across, "nodes do not meet", **every),
        faulty(
            node,
            "meshes-fault-order-of-gathering",
            scattered_in_full_and_gathered_in_the_same_order,
            "gathered in the order of scattering",
            **every,
        ),
        faulty(
            one, "meshes-fault-order-of-parts", gathered_in_another_order, "parts are put together in a wrong order", **every
        ),
        faulty(one, "meshes-fault-averaged-and-divided", averaged_and_divided, "averaged after a division", **every),
        faulty(one, "meshes-fault-overlapping-groups", overlapping_groups, "the pairs lie inside of the halves", **every),
        faulty(
            wide,
            "meshes-fault-no-copy",
            with_grid(GridWithoutCopy),
            "the gradient of the input is not summed over tp",
            **every,
        ),
        faulty(
            wide, "meshes-fault-one-not-reduced", with_grid(finish=loss_averaged_only), "not reduced over replicas", **every
        ),
        faulty(
            wide,
            "meshes-fault-divided-by-tensor-ranks",
            with_grid(finish=averaged_over_tensor_ranks),
            "divided by the tensor ranks too",
            **every,
        ),
        faulty(grid, "meshes-fault-only-over-data", only_over_data, "the gradients are not reduced over cp", **every),
        faulty(small, "meshes-fault-position-of-another-axis", masked_by_another_axis, "the position on another axis", **every),
        faulty(
            grid,
            "meshes-fault-summed-over-context",
            summed_over_context,
            "means over parts of the sequence are summed",
            **every,
        ),
    ]


DEEP, ATTENTIVE = [(1, 2, 2), (2, 2, 1), (2, 2, 2), (2, 1, 2), (1, 4, 2)], [(1, 2, 2), (2, 2, 1), (2, 1, 2), (2, 2, 2)]
CASES = [
    *[case for size in (2, 4, 8) for case in correct(size)],
    *[deep(f"dp{dp}-pp{pp}-tp{tp}", with_grid(), dp, pp, tp) for dp, pp, tp in DEEP],
    *[attentive(f"dp{dp}-cp{cp}-tp{tp}", three_axes_step, dp, cp, tp) for dp, cp, tp in ATTENTIVE],
    *[attentive(f"flat-dp{dp}-cp{cp}-tp{tp}", three_axes_flat_step, dp, cp, tp) for dp, cp, tp in ATTENTIVE],
    *faults(),
]
