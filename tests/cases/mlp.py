"""Tensor-parallel MLPs: the first layer split by columns, the second by rows."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.leaves import gradients, leaves
from cases.regions import copy_to, gather_sequence, reduce_from, reduce_scatter_sequence
from graphguard import Input, Partial, Shard

TP = (2, 4, 8)
COLUMN, ROW = Shard(0), Shard(1)  # of weights stored as F.linear has them, [out, in]


def tp_case(name, sequential, distributed, tp, shapes, split, split_outputs=(), **options):
    """`split` has the placements of sharded inputs, which their gradients share; `split_outputs` those of other outputs."""
    inputs = {key: Input(shape, {"tp": split[key]} if key in split else {}) for key, shape in shapes.items()}
    grads = {f"grads.{key}": {"tp": split[key]} if key in split else {} for key in shapes if key not in ("dy", "target")}
    return Case(name, sequential, distributed, {"tp": tp}, inputs, {**dict(split_outputs), **grads}, **options)


def summed(grads, names, group):
    for name in names:
        dist.all_reduce(grads[name], group=group)
    return grads


# ---------------------------------------------------------------------- relu, no biases
def relu_mlp(x, a, b, dy):
    p = leaves({"x": x, "a": a, "b": b})
    y = torch.relu(p["x"] @ p["a"]) @ p["b"]
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def relu_mlp_tp(x, a, b, dy, mesh):
    group = mesh.get_group("tp")
    p = leaves({"x": x, "a": a, "b": b})
    y = reduce_from(torch.relu(copy_to(p["x"], group) @ p["a"]) @ p["b"], group)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def relu_mlp_by_hand(x, a, b, dy):
    """The backward written out, with plain collectives."""
    before = x @ a
    hidden = before.clamp(min=0)
    y = hidden @ b
    dist.all_reduce(y)
    d_before = (dy @ b.t()) * (before > 0)
    dx = d_before @ a.t()
    work = dist.all_reduce(dx, async_op=True)
    grads = {"a": x.t() @ d_before, "b": hidden.t() @ dy}
    work.wait()
    return {"y": y, "grads": {"x": dx, **grads}}


class ReduceScatterGather(torch.autograd.Function):
    """An all-reduce taken apart: each rank sums its rows, then all rows are gathered."""

    @staticmethod
    def forward(ctx, x, group):
        part = x.new_empty(x.size(0) // dist.get_world_size(group), *x.shape[1:])
        dist.reduce_scatter_tensor(part, x.contiguous(), group=group)
        whole = torch.empty_like(x)
        dist.all_gather_into_tensor(whole, part, group=group)
        return whole

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def relu_mlp_reduce_scatter_gather(x, a, b, dy, mesh):
    group = mesh.get_group("tp")
    p = leaves({"x": x, "a": a, "b": b})
    y = ReduceScatterGather.apply(torch.relu(copy_to(p["x"], group) @ p["a"]) @ p["b"], group)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def relu_mlp_without_copy(x, a, b, dy, mesh):
    group = mesh.get_group("tp")
    p = leaves({"x": x, "a": a, "b": b})
    h = torch.relu(p["x"] @ p["a"])  # fault: the gradient of x is not summed
    y = reduce_from(h @ p["b"], group)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def relu_mlp_averaged(x, a, b, dy):
    before = x @ a
    hidden = before.clamp(min=0)
    y = hidden @ b
    dist.all_reduce(y, op=dist.ReduceOp.AVG)  # fault: mean in place of a sum
    d_before = (dy @ b.t()) * (before > 0)
    dx = d_before @ a.t()
    dist.all_reduce(dx)
    return {"y": y, "grads": {"x": dx, "a": x.t() @ d_before, "b": hidden.t() @ dy}}


def relu_after_reduction_only(x, a, b, dy, mesh):
    """As if the first layer were split by rows of x's features: the sum comes too late for the relu."""
    group = mesh.get_group("tp")
    p = leaves({"x": x, "a": a, "b": b})
    h = torch.relu(p["x"] @ p["a"])  # fault: relu of partial sums
    y = reduce_from(h, group) @ p["b"]
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def relu_mlp_gathered_out_of_order(x, a, b, dy):
    before = x @ a
    hidden = before.clamp(min=0)
    parts = list((hidden @ b).chunk(dist.get_world_size()))
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts)
    rows = [torch.empty_like(mine) for _ in parts]
    dist.all_gather(rows, mine)
    y = torch.cat(rows[::-1])  # fault: gathered rows in reverse
    d_before = (dy @ b.t()) * (before > 0)
    dx = d_before @ a.t()
    dist.all_reduce(dx)
    return {"y": y, "grads": {"x": dx, "a": x.t() @ d_before, "b": hidden.t() @ dy}}


def relu_case(name, distributed, tp, *, tokens=16, hidden=5, inner=24):
    shapes = {"x": (tokens, hidden), "a": (hidden, inner), "b": (inner, 7), "dy": (tokens, 7)}
    return tp_case(f"mlp-{name}-tp{tp}", relu_mlp, distributed, tp, shapes, {"a": Shard(1), "b": Shard(0)}, {"y": {}})


def relu_cases():
    for tp in TP:
        yield relu_case("relu", relu_mlp_tp, tp)
        yield relu_case("by-hand", relu_mlp_by_hand, tp, tokens=3, inner=8)
        yield relu_case("reduce-scatter-gather", relu_mlp_reduce_scatter_gather, tp)
    yield relu_case("relu-uneven", relu_mlp_tp, 4, inner=10)
    yield relu_case("relu-with-an-empty-shard", relu_mlp_by_hand, 4, inner=6)


def relu_faults():
    base = relu_case("relu", relu_mlp_tp, 4)
    yield faulty(base, "mlp-missing-copy", relu_mlp_without_copy, "the gradient of x is not summed", stated=("grads.x",))
    yield faulty(base, "mlp-averaged", relu_mlp_averaged, "mean in place of a sum")
    yield faulty(base, "mlp-out-of-order", relu_mlp_gathered_out_of_order, "gathered rows in reverse")
    rows = tp_case(
        "mlp-rows-first", relu_mlp, relu_after_reduction_only, 2,
        {"x": (3, 8), "a": (8, 6), "b": (6, 5), "dy": (3, 5)}, {"x": Shard(1), "a": Shard(0)}, {"y": {}},
    )  # fmt: skip
    yield faulty(rows, "mlp-relu-of-partial-sums", relu_after_reduction_only, "relu of partial sums")


# ---------------------------------------------------------------------- gelu with biases, a residual and a loss
def gelu_mlp(x, target, **params):
    p = leaves({"x": x, **params})
    h = F.gelu(F.linear(p["x"], p["w1"], p["b1"]))
    y = p["x"] + F.linear(h, p["w2"], p["b2"])
    loss = F.mse_loss(y, target)
    return {"loss": loss.detach(), "y": y.detach(), "grads": gradients(loss, p)}


def gelu_mlp_tp(x, target, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = F.gelu(F.linear(copy_to(p["x"], group), p["w1"], p["b1"]))
    y = p["x"] + reduce_from(F.linear(h, p["w2"]), group) + p["b2"]
    loss = F.mse_loss(y, target)
    return {"loss": loss.detach(), "y": y.detach(), "grads": gradients(loss, p)}


def gelu_mlp_bias_on_first_rank(x, target, mesh, **params):
    """The second bias is added inside the sum, by one rank."""
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = F.gelu(F.linear(copy_to(p["x"], group), p["w1"], p["b1"]))
    b2 = p["b2"] if dist.get_rank(group) == 0 else torch.zeros_like(p["b2"]) * p["b2"]
    y = p["x"] + reduce_from(F.linear(h, p["w2"], b2), group)
    loss = F.mse_loss(y, target)
    return {"loss": loss.detach(), "y": y.detach(), "grads": summed(gradients(loss, p), ("b2",), group)}


def gelu_mlp_bias_divided(x, target, mesh, **params):
    """The second bias is added inside the sum, an equal part by every rank."""
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = F.gelu(F.linear(copy_to(p["x"], group), p["w1"], p["b1"]))
    y = p["x"] + reduce_from(F.linear(h, p["w2"], p["b2"] / dist.get_world_size(group)), group)
    loss = F.mse_loss(y, target)
    return {"loss": loss.detach(), "y": y.detach(), "grads": summed(gradients(loss, p), ("b2",), group)}


def gelu_mlp_without_reduction(x, target, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = F.gelu(F.linear(copy_to(p["x"], group), p["w1"], p["b1"]))
    h = F.linear(h, p["w2"])
    y = p["x"] + h + p["b2"]  # fault: the partial products are not summed
    loss = F.mse_loss(y, target)
    return {"loss": loss.detach(), "y": y.detach(), "grads": gradients(loss, p)}


def gelu_mlp_bias_on_every_rank(x, target, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = F.gelu(F.linear(copy_to(p["x"], group), p["w1"], p["b1"]))
    h = F.linear(h, p["w2"], p["b2"])  # fault: the bias is summed over the ranks
    y = p["x"] + reduce_from(h, group)
    loss = F.mse_loss(y, target)
    return {"loss": loss.detach(), "y": y.detach(), "grads": gradients(loss, p)}


def gelu_mlp_residual_inside(x, target, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = F.gelu(F.linear(copy_to(p["x"], group), p["w1"], p["b1"]))
    h = p["x"] + F.linear(h, p["w2"])  # fault: the residual is summed over the ranks
    y = reduce_from(h, group) + p["b2"]
    loss = F.mse_loss(y, target)
    return {"loss": loss.detach(), "y": y.detach(), "grads": gradients(loss, p)}


def gelu_mlp_reduced_twice(x, target, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = F.gelu(F.linear(copy_to(p["x"], group), p["w1"], p["b1"]))
    h = reduce_from(F.linear(h, p["w2"]), group)
    dist.all_reduce(h, group=group)  # fault: summed a second time
    y = p["x"] + h + p["b2"]
    loss = F.mse_loss(y, target)
    return {"loss": loss.detach(), "y": y.detach(), "grads": gradients(loss, p)}


GELU_SPLIT = {"w1": COLUMN, "b1": COLUMN, "w2": ROW}


def gelu_case(name, distributed, tp, *, inner=16):
    shapes = {"x": (2, 3, 5), "w1": (inner, 5), "b1": (inner,), "w2": (5, inner), "b2": (5,), "target": (2, 3, 5)}
    return tp_case(f"mlp-{name}-tp{tp}", gelu_mlp, distributed, tp, shapes, GELU_SPLIT, {"loss": {}, "y": {}})


def gelu_cases():
    for tp in TP:
        yield gelu_case("gelu", gelu_mlp_tp, tp)
        yield gelu_case("bias-on-first-rank", gelu_mlp_bias_on_first_rank, tp, inner=8)
        yield gelu_case("bias-divided", gelu_mlp_bias_divided, tp, inner=8)
    yield gelu_case("gelu-uneven", gelu_mlp_tp, 4, inner=11)


def gelu_faults():
    base = gelu_case("gelu", gelu_mlp_tp, 2)
    yield faulty(base, "mlp-missing-reduction", gelu_mlp_without_reduction, "the partial products are not summed")
    yield faulty(base, "mlp-bias-on-every-rank", gelu_mlp_bias_on_every_rank, "the bias is summed over the ranks")
    yield faulty(base, "mlp-residual-inside", gelu_mlp_residual_inside, "the residual is summed over the ranks")
    yield faulty(base, "mlp-reduced-twice", gelu_mlp_reduced_twice, "summed a second time")


# ---------------------------------------------------------------------- swiglu
def swiglu(x, gate, up, down, dy):
    p = leaves({"x": x, "gate": gate, "up": up, "down": down})
    h = F.silu(F.linear(p["x"], p["gate"])) * F.linear(p["x"], p["up"])
    y = p["x"] + F.linear(h, p["down"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def swiglu_tp(x, gate, up, down, dy, mesh):
    group = mesh.get_group("tp")
    p = leaves({"x": x, "gate": gate, "up": up, "down": down})
    h = copy_to(p["x"], group)
    h = F.silu(F.linear(h, p["gate"])) * F.linear(h, p["up"])
    y = p["x"] + reduce_from(F.linear(h, p["down"]), group)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def swiglu_fused_tp(x, gate_up, down, dy, mesh):
    """One product for both halves; the rank's weight is its gate rows above its up rows."""
    group = mesh.get_group("tp")
    p = leaves({"x": x, "gate_up": gate_up, "down": down})
    gate, up = F.linear(copy_to(p["x"], group), p["gate_up"]).chunk(2, -1)
    y = p["x"] + reduce_from(F.linear(F.silu(gate) * up, p["down"]), group)
    grads = gradients(y, p, dy)
    grads["gate"], grads["up"] = grads.pop("gate_up").chunk(2)
    return {"y": y.detach(), "grads": grads}


def swiglu_halves_swapped(x, gate_up, down, dy, mesh):
    group = mesh.get_group("tp")
    p = leaves({"x": x, "gate_up": gate_up, "down": down})
    up, gate = F.linear(copy_to(p["x"], group), p["gate_up"]).chunk(2, -1)  # fault: gate and up are swapped
    y = p["x"] + reduce_from(F.linear(F.silu(gate) * up, p["down"]), group)
    grads = gradients(y, p, dy)
    grads["gate"], grads["up"] = grads.pop("gate_up").chunk(2)
    return {"y": y.detach(), "grads": grads}


def swiglu_resharded_as_one(x, gate_up, down, dy, mesh):
    group = mesh.get_group("tp")
    p = leaves({"x": x, "gate_up": gate_up, "down": down})
    gate, up = F.linear(copy_to(p["x"], group), p["gate_up"]).chunk(2, -1)
    h = F.silu(gate) * up  # fault: both are rows of one half
    y = p["x"] + reduce_from(F.linear(h, p["down"]), group)
    grads = gradients(y, p, dy)
    grads["gate"], grads["up"] = grads.pop("gate_up").chunk(2)
    return {"y": y.detach(), "grads": grads}


def fused_rows(full, coord, tp):
    """A rank's rows of both halves, as a fused checkpoint must be resharded."""
    r = coord["tp"]
    gate_up = torch.cat([full["gate"].chunk(tp)[r], full["up"].chunk(tp)[r]])
    return {"x": full["x"], "gate_up": gate_up, "down": full["down"].chunk(tp, 1)[r], "dy": full["dy"]}


def unfused_rows(full, coord, tp):
    """A rank's share of the fused weight as if it were one layer."""
    r = coord["tp"]
    gate_up = torch.cat([full["gate"], full["up"]]).chunk(tp)[r]
    return {"x": full["x"], "gate_up": gate_up, "down": full["down"].chunk(tp, 1)[r], "dy": full["dy"]}


SWIGLU_SPLIT = {"gate": COLUMN, "up": COLUMN, "down": ROW}


def swiglu_case(name, distributed, tp, *, inner=16):
    shapes = {"x": (3, 6), "gate": (inner, 6), "up": (inner, 6), "down": (6, inner), "dy": (3, 6)}
    return tp_case(f"mlp-{name}-tp{tp}", swiglu, distributed, tp, shapes, SWIGLU_SPLIT, {"y": {}})


def fused_case(name, distributed, tp, rows=fused_rows, *, inner=16):
    shapes = {"x": (3, 6), "gate": (inner, 6), "up": (inner, 6), "down": (6, inner), "dy": (3, 6)}
    relation = {"y": {}, "grads.x": {}, **{f"grads.{key}": {"tp": split} for key, split in SWIGLU_SPLIT.items()}}
    inputs = {key: Input(shape) for key, shape in shapes.items()}
    mine = lambda full, coord: rows(full, coord, tp)
    return Case(f"mlp-{name}-tp{tp}", swiglu, distributed, {"tp": tp}, inputs, relation, local_inputs=mine)


def swiglu_cases():
    for tp in TP:
        yield swiglu_case("swiglu", swiglu_tp, tp)
        yield fused_case("swiglu-fused", swiglu_fused_tp, tp, inner=8 if tp == 8 else 12)
    yield swiglu_case("swiglu-uneven", swiglu_tp, 4, inner=9)
    yield fused_case("swiglu-fused-uneven", swiglu_fused_tp, 4, inner=10)


def swiglu_faults():
    right, wrong = fused_case("", swiglu_fused_tp, 2), fused_case("", swiglu_fused_tp, 2, unfused_rows)
    yield faulty(right, "mlp-swiglu-halves-swapped", swiglu_halves_swapped, "gate and up are swapped")
    yield faulty(wrong, "mlp-swiglu-resharded-as-one", swiglu_resharded_as_one, "both are rows of one half")


# ---------------------------------------------------------------------- sequence parallel
def normed_mlp(x, target, **params):
    """x: [sequence, batch, hidden]."""
    p = leaves({"x": x, **params})
    h = F.layer_norm(p["x"], p["x"].shape[-1:], p["scale"], p["shift"])
    h = F.gelu(F.linear(h, p["w1"], p["b1"]), approximate="tanh")
    y = p["x"] + F.linear(h, p["w2"], p["b2"])
    loss = (y - target).square().mean()
    return {"loss": loss.detach(), "y": y.detach(), "grads": gradients(loss, p)}


def mean_over_sequence(error, group):
    """The loss of this rank's tokens, over the number of all tokens: it sums to the loss."""
    return error.sum() / (error.numel() * dist.get_world_size(group))


ON_SHARDS = ("scale", "shift", "b2")  # parameters that meet only this rank's tokens


def normed_mlp_sp(x, target, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = F.layer_norm(p["x"], p["x"].shape[-1:], p["scale"], p["shift"])
    h = F.gelu(F.linear(gather_sequence(h, group), p["w1"], p["b1"]), approximate="tanh")
    y = p["x"] + reduce_scatter_sequence(F.linear(h, p["w2"]), group) + p["b2"]
    loss = mean_over_sequence((y - target).square(), group)
    return {"loss": loss.detach(), "y": y.detach(), "grads": summed(gradients(loss, p), ON_SHARDS, group)}


def normed_mlp_sp_functional(x, target, mesh, **params):
    """The same with torch's functional collectives, which know their own backwards."""
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = F.layer_norm(p["x"], p["x"].shape[-1:], p["scale"], p["shift"])
    h = funcol.all_gather_tensor_autograd(h, 0, group)
    h = F.linear(F.gelu(F.linear(h, p["w1"], p["b1"]), approximate="tanh"), p["w2"])
    y = p["x"] + funcol.reduce_scatter_tensor_autograd(h, "sum", 0, group) + p["b2"]
    loss = mean_over_sequence((y - target).square(), group)
    grads = gradients(loss, p)
    grads |= {name: funcol.all_reduce(grads[name], "sum", group) for name in ON_SHARDS}
    loss = funcol.all_reduce(loss.detach(), "sum", group)
    return {"loss": loss, "y": y.detach(), "grads": grads}


def normed_mlp_sp_partial_norm_gradient(x, target, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = F.layer_norm(p["x"], p["x"].shape[-1:], p["scale"], p["shift"])  # fault: the norm's gradients are not summed
    h = F.gelu(F.linear(gather_sequence(h, group), p["w1"], p["b1"]), approximate="tanh")
    y = p["x"] + reduce_scatter_sequence(F.linear(h, p["w2"]), group) + p["b2"]
    loss = mean_over_sequence((y - target).square(), group)
    return {"loss": loss.detach(), "y": y.detach(), "grads": summed(gradients(loss, p), ("b2",), group)}


def normed_mlp_sp_summed_too_often(x, target, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = F.layer_norm(p["x"], p["x"].shape[-1:], p["scale"], p["shift"])
    h = F.gelu(F.linear(gather_sequence(h, group), p["w1"], p["b1"]), approximate="tanh")
    y = p["x"] + reduce_scatter_sequence(F.linear(h, p["w2"]), group) + p["b2"]
    loss = mean_over_sequence((y - target).square(), group)
    grads = summed(gradients(loss, p), ON_SHARDS, group)
    dist.all_reduce(grads["b1"], group=group)  # fault: b1 is sharded, its gradient is complete
    return {"loss": loss.detach(), "y": y.detach(), "grads": grads}


def normed_mlp_sp_local_mean(x, target, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = F.layer_norm(p["x"], p["x"].shape[-1:], p["scale"], p["shift"])
    h = F.gelu(F.linear(gather_sequence(h, group), p["w1"], p["b1"]), approximate="tanh")
    y = p["x"] + reduce_scatter_sequence(F.linear(h, p["w2"]), group) + p["b2"]
    loss = (y - target).square().mean()  # fault: the mean of this rank's tokens
    return {"loss": loss.detach(), "y": y.detach(), "grads": summed(gradients(loss, p), ON_SHARDS, group)}


def sequence_case(name, distributed, tp, loss, *, sequence=8, inner=24):
    shapes = {
        "x": (sequence, 3, 5), "target": (sequence, 3, 5), "scale": (5,), "shift": (5,),
        "w1": (inner, 5), "b1": (inner,), "w2": (5, inner), "b2": (5,),
    }  # fmt: skip
    split = {"x": Shard(0), "target": Shard(0), **GELU_SPLIT}
    return tp_case(
        f"mlp-{name}-tp{tp}", normed_mlp, distributed, tp, shapes, split, {"loss": loss, "y": {"tp": Shard(0)}}
    )  # fmt: skip


def sequence_cases():
    for tp in TP:
        yield sequence_case("sequence-parallel", normed_mlp_sp, tp, {"tp": Partial()})
        yield sequence_case("functional-collectives", normed_mlp_sp_functional, tp, {}, sequence=16, inner=8)


def sequence_faults():
    base = sequence_case("sequence-parallel", normed_mlp_sp, 4, {"tp": Partial()})
    yield faulty(
        base, "mlp-norm-gradient-partial", normed_mlp_sp_partial_norm_gradient, "the norm's gradients are not summed",
        stated=("grads.scale", "grads.shift"),
    )  # fmt: skip
    yield faulty(
        base, "mlp-sharded-bias-summed", normed_mlp_sp_summed_too_often, "b1 is sharded, its gradient is complete"
    )  # fmt: skip
    yield faulty(base, "mlp-local-mean", normed_mlp_sp_local_mean, "the mean of this rank's tokens")


# ---------------------------------------------------------------------- data and tensor parallel
def gelu_mlp_dp_tp(x, target, mesh, **params):
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = F.gelu(F.linear(copy_to(p["x"], tp), p["w1"], p["b1"]))
    y = p["x"] + reduce_from(F.linear(h, p["w2"]), tp) + p["b2"]
    loss = F.mse_loss(y, target) / dist.get_world_size(dp)
    return {"loss": loss.detach(), "y": y.detach(), "grads": summed(gradients(loss, p), params, dp)}


def gelu_mlp_dp_tp_wrong_group(x, target, mesh, **params):
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = F.gelu(F.linear(copy_to(p["x"], tp), p["w1"], p["b1"]))
    h = reduce_from(F.linear(h, p["w2"]), dp)  # fault: summed over the wrong axis
    y = p["x"] + h + p["b2"]
    loss = F.mse_loss(y, target) / dist.get_world_size(dp)
    return {"loss": loss.detach(), "y": y.detach(), "grads": summed(gradients(loss, p), params, dp)}


def dp_tp_case(name, distributed, dp, tp):
    shapes = {"w1": (8, 5), "b1": (8,), "w2": (5, 8), "b2": (5,)}
    weights = {key: Input(shape, {"tp": GELU_SPLIT[key]} if key in GELU_SPLIT else {}) for key, shape in shapes.items()}
    batch = {key: Input((6 * dp, 5), {"dp": Shard(0)}) for key in ("x", "target")}
    relation = {"loss": {"dp": Partial()}, "y": {"dp": Shard(0)}, "grads.x": {"dp": Shard(0)}}
    relation |= {f"grads.{key}": {"tp": GELU_SPLIT[key]} if key in GELU_SPLIT else {} for key in shapes}
    return Case(f"mlp-{name}-dp{dp}-tp{tp}", gelu_mlp, distributed, {"dp": dp, "tp": tp}, batch | weights, relation)


def dp_tp_cases():
    for dp, tp in ((2, 2), (2, 4), (4, 2)):
        yield dp_tp_case("gelu", gelu_mlp_dp_tp, dp, tp)


def dp_tp_faults():
    base = dp_tp_case("gelu", gelu_mlp_dp_tp, 2, 2)
    yield faulty(base, "mlp-wrong-group", gelu_mlp_dp_tp_wrong_group, "summed over the wrong axis")


CASES = [
    *relu_cases(), *gelu_cases(), *swiglu_cases(), *sequence_cases(), *dp_tp_cases(),
    *relu_faults(), *gelu_faults(), *swiglu_faults(), *sequence_faults(), *dp_tp_faults(),
]  # fmt: skip
