"""Programs that are equal by algebra rather than by layout: the order of products, sums and means, shifts, partial inputs."""

import torch
import torch.distributed as dist

import graphguard as gg
from cases.case import Case, faulty
from cases.norms import SumOfParts, differentiated, leaves
from cases.regions import copy_to, reduce_from
from graphguard import Partial, Shard


# ---------------------------------------------------------------------- the order of products
def left_first(x, a, b, dy):
    leaves(x, a, b)
    return differentiated((x @ a) @ b, dy, x=x, a=a, b=b)


def right_first(x, a, b, dy):
    """On ranks that split the inner dim, each has one summand of a @ b."""
    leaves(x, a, b)
    return differentiated(reduce_from(copy_to(x, None) @ (a @ b), None), dy, x=x, a=a, b=b)


def merged_weight(x, a, b, dy):
    """The summands of a @ b are summed before they are used, as when an adapter is merged; gradients by formula."""
    merged = a @ b
    dist.all_reduce(merged)
    d_merged = x.t() @ dy
    return {"y": x @ merged, "grads": {"x": dy @ merged.t(), "a": d_merged @ b.t(), "b": a.t() @ d_merged}}


def merged_on_rows(x, a, b, dy):
    """Ranks have some rows of x and all weights."""
    leaves(x, a, b)
    out = differentiated(x @ (a @ b), dy, x=x, a=a, b=b)
    dist.all_reduce(out["grads"]["a"])
    dist.all_reduce(out["grads"]["b"])
    return out


def exchanged_weights(x, a, b, dy):
    leaves(x, a, b)
    merged = b @ a  # fault: the weights are exchanged
    out = differentiated(x @ merged, dy, x=x, a=a, b=b)
    dist.all_reduce(out["grads"]["a"])
    dist.all_reduce(out["grads"]["b"])
    return out


# ---------------------------------------------------------------------- sums and products
def sum_first(u, v, w, dy):
    leaves(u, v, w)
    return differentiated((u + v) @ w, dy, u=u, v=v, w=w)


def products_first(u, v, w, dy):
    leaves(u, v, w)
    return differentiated(copy_to(u, None) @ w + copy_to(v, None) @ w, dy, u=u, v=v, w=w)


def sums_of_two_products(u, v, w, dy):
    leaves(u, v, w)
    return differentiated(reduce_from(u @ w, None) + reduce_from(v @ w, None), dy, u=u, v=v, w=w)


def total_summed_again(u, v, w, dy):
    leaves(u, v, w)
    total = reduce_from(u @ w, None)
    part = total + v @ w  # fault: a total is added to a summand, and summed again
    return differentiated(reduce_from(part, None), dy, u=u, v=v, w=w)


# ---------------------------------------------------------------------- two formulas of the variance
def variance_around_mean(x, dy):
    leaves(x)
    return differentiated((x - x.mean(-1, keepdim=True)).square().mean(-1), dy, x=x)


def variance_by_moments(x, dy):
    leaves(x)
    return differentiated(x.square().mean(-1) - x.mean(-1).square(), dy, x=x)


def variance_of_parts_around_mean(count):
    """The gradient by formula: that of the mean cancels."""

    def step(x, dy):
        mean = x.sum(-1, keepdim=True)
        dist.all_reduce(mean)
        centred = x - mean / count
        total = centred.square().sum(-1)
        dist.all_reduce(total)
        return {"y": total / count, "grads": {"x": 2 / count * centred * dy[:, None]}}

    return step


def variance_of_parts_by_moments(count):
    def step(x, dy):
        leaves(x)
        sums = reduce_from(torch.stack([x.sum(-1), x.square().sum(-1)]), None) / count
        return differentiated(sums[1] - sums[0].square(), dy, x=x)

    return step


def variance_of_local_moments(x, dy):
    leaves(x)
    local = x.square().mean(-1) - x.mean(-1).square()
    y = reduce_from(local, None) / dist.get_world_size()  # fault: variances around local means are averaged
    return differentiated(y, dy, x=x)


# ---------------------------------------------------------------------- softmax with any shift
def softmax(x, dy):
    leaves(x)
    return differentiated(torch.softmax(x, -1), dy, x=x)


def softmax_by_hand(x, dy):
    leaves(x)
    weights = (x - x.amax(-1, keepdim=True).detach()).exp()
    return differentiated(weights / weights.sum(-1, keepdim=True), dy, x=x)


def true_max(x):
    shift = x.amax(-1, keepdim=True)
    dist.all_reduce(shift, op=dist.ReduceOp.MAX)
    return shift


def summed_max(x):
    """Not the maximum, but the same on all ranks, which is all that is needed over the reals."""
    shift = x.amax(-1, keepdim=True)
    dist.all_reduce(shift)
    return shift


def no_shift(x):
    return torch.zeros_like(x[..., :1])


def split_softmax(shift_of):
    def step(x, dy):
        leaves(x)
        weights = (x - shift_of(x.detach())).exp()
        return differentiated(weights / SumOfParts.apply(weights.sum(-1, keepdim=True)), dy, x=x)

    return step


def log_sum_exp(x, dy):
    leaves(x)
    return differentiated(torch.logsumexp(x, -1), dy, x=x)


def split_log_sum_exp(shift_of):
    """Here the shift is added back; each rank's exponentials are its own, so the sum's gradient passes."""

    def step(x, dy):
        leaves(x)
        shift = shift_of(x.detach())
        total = reduce_from((x - shift).exp().sum(-1), None)
        return differentiated(total.log() + shift.squeeze(-1), dy, x=x)

    return step


def softmax_with_local_max(x, dy):
    leaves(x)
    weights = (x - x.detach().amax(-1, keepdim=True)).exp()
    total = SumOfParts.apply(weights.sum(-1, keepdim=True))  # fault: summands with different shifts
    return differentiated(weights / total, dy, x=x)


def log_sum_exp_with_summed_shift_once(x, dy):
    leaves(x)
    shift = x.detach().amax(-1)
    dist.all_reduce(shift)
    total = reduce_from((x - shift[:, None]).exp().sum(-1), None)
    y = total.log() + shift / dist.get_world_size()  # fault: another shift is added than was taken off
    return differentiated(y, dy, x=x)


# ---------------------------------------------------------------------- mean of equal means
def mean(x):
    leaves(x)
    y = x.square().mean()
    return {"y": y.detach(), "grads": {"x": torch.autograd.grad(y, x)[0]}}


def mean_of_means(x):
    leaves(x)
    local = x.square().mean()
    grad = torch.autograd.grad(local / dist.get_world_size(), x)[0]
    y = local.detach()
    dist.all_reduce(y, op=dist.ReduceOp.AVG)
    return {"y": y, "grads": {"x": grad}}


def mean_of_gathered_means(x):
    """Means over columns, then over rows, then over ranks."""
    leaves(x)
    local = x.square().mean(-1).mean()
    grad = torch.autograd.grad(local / dist.get_world_size(), x)[0]
    means = x.new_empty(dist.get_world_size())
    dist.all_gather_into_tensor(means, local.detach().reshape(1))
    return {"y": means.mean(), "grads": {"x": grad}}


def mean_of_unequal_means(x):
    leaves(x)
    local = x.square().mean()
    count = torch.full((), float(x.numel()))
    dist.all_reduce(count)
    grad = torch.autograd.grad(local * x.numel() / count, x)[0]
    y = local.detach()
    dist.all_reduce(y, op=dist.ReduceOp.AVG)  # fault: the ranks' means are over different numbers of rows
    return {"y": y, "grads": {"x": grad}}


# ---------------------------------------------------------------------- a bias before the sum
def affine(x, w, b, dy):
    leaves(x, w, b)
    return differentiated(x @ w + b, dy, x=x, w=w, b=b)


def bias_on_first_rank(x, w, b, dy):
    leaves(x, w, b)
    part = x @ w
    if dist.get_rank() == 0:
        part = part + b
    y = reduce_from(part, None)
    dx, dw = torch.autograd.grad(y, (x, w), dy, retain_graph=True)
    db = torch.autograd.grad(y, b, dy)[0] if dist.get_rank() == 0 else torch.empty_like(b)
    dist.broadcast(db, src=0)
    return {"y": y.detach(), "grads": {"x": dx, "w": dw, "b": db}}


def masked_bias(x, w, b, dy):
    """The same without a branch: all but one rank add zero."""
    leaves(x, w, b)
    mask = 1.0 if dist.get_rank() == 0 else 0.0
    out = differentiated(reduce_from(x @ w + mask * b, None), dy, x=x, w=w, b=b)
    dist.all_reduce(out["grads"]["b"])
    return out


def shared_bias(x, w, b, dy):
    """Every rank adds its share of the bias."""
    leaves(x, w, b)
    out = differentiated(reduce_from(x @ w + b / dist.get_world_size(), None), dy, x=x, w=w, b=b)
    dist.all_reduce(out["grads"]["b"])
    return out


def bias_on_every_rank(x, w, b, dy):
    leaves(x, w, b)
    part = x @ w
    part = part + b  # fault: the bias is added on every rank, and summed
    return differentiated(reduce_from(part, None), dy, x=x, w=w, b=b)


def bias_gradient_of_shares(x, w, b, dy):
    leaves(x, w, b)
    share = b / dist.get_world_size()  # fault: the gradients of the shares are not summed
    return differentiated(reduce_from(x @ w + share, None), dy, x=x, w=w, b=b)


# ---------------------------------------------------------------------- inputs that are summands
def product(x, w, dy):
    leaves(x, w)
    return differentiated(x @ w, dy, x=x, w=w)


def product_of_summands(x, w, dy):
    """Everything linear passes a sum: it is taken at the end, or left to the reader."""
    leaves(x, w)
    out = differentiated(x @ w, dy, x=x, w=w)
    dist.all_reduce(out["y"])
    return out


def product_of_summands_left_partial(x, w, dy):
    leaves(x, w)
    return differentiated(x @ w, dy, x=x, w=w)


def activated(x, w, dy):
    leaves(x, w)
    return differentiated(torch.relu(x) @ w, dy, x=x, w=w)


def summed_then_activated(x, w, dy):
    leaves(x, w)
    return differentiated(torch.relu(reduce_from(x, None)) @ w, dy, x=x, w=w)


def activated_then_summed(x, w, dy):
    leaves(x, w)
    y = torch.relu(x) @ w  # fault: the activation of a summand
    return differentiated(reduce_from(y, None), dy, x=x, w=w)


def summed_too_often(x, w, dy):
    leaves(x, w)
    total = reduce_from(x, None)
    out = differentiated(total @ w, dy, x=x, w=w)
    dist.all_reduce(out["y"])  # fault: summed before and after the product
    return out


# ---------------------------------------------------------------------- cases
def products_case(name, distributed, size, inner=16):
    inputs = {
        "x": gg.Input((5, 6)),
        "a": gg.Input((6, inner), {"tp": Shard(1)}),
        "b": gg.Input((inner, 7), {"tp": Shard(0)}),
        "dy": gg.Input((5, 7)),
    }
    relation = {"y": {}, "grads.x": {}, "grads.a": {"tp": Shard(1)}, "grads.b": {"tp": Shard(0)}}
    return Case(f"identities-{name}-{size}", left_first, distributed, {"tp": size}, inputs, relation)


def rows_case(size, rows=8, inner=4, out=7):
    split = {"dp": Shard(0)}
    inputs = {
        "x": gg.Input((rows, 6), split),
        "a": gg.Input((6, inner)),
        "b": gg.Input((inner, out)),
        "dy": gg.Input((rows, out), split),
    }
    relation = {"y": split, "grads.x": split, "grads.a": {}, "grads.b": {}}
    return Case(f"identities-merged-on-{rows}-rows-{size}", left_first, merged_on_rows, {"dp": size}, inputs, relation)


def columns_case(size):
    split = {"tp": Shard(1)}
    inputs = {"u": gg.Input((5, 6)), "v": gg.Input((5, 6)), "w": gg.Input((6, 8), split), "dy": gg.Input((5, 8), split)}
    relation = {"y": split, "grads.u": {}, "grads.v": {}, "grads.w": split}
    return Case(f"identities-products-first-{size}", sum_first, products_first, {"tp": size}, inputs, relation)


def split_rows_case(name, distributed, size, inner=8):
    split, rows = {"tp": Shard(1)}, {"tp": Shard(0)}
    inputs = {
        "u": gg.Input((5, inner), split),
        "v": gg.Input((5, inner), split),
        "w": gg.Input((inner, 7), rows),
        "dy": gg.Input((5, 7)),
    }
    relation = {"y": {}, "grads.u": split, "grads.v": split, "grads.w": rows}
    return Case(f"identities-{name}-{size}", sum_first, distributed, {"tp": size}, inputs, relation)


def last_dim_case(name, sequential, distributed, size, count=16, whole=False):
    """`whole`: y has one value for each row, else it is split as x is."""
    split = {"tp": Shard(1)}
    inputs = {"x": gg.Input((5, count), split), "dy": gg.Input((5,)) if whole else gg.Input((5, count), split)}
    relation = {"y": {} if whole else split, "grads.x": split}
    return Case(f"identities-{name}-{size}", sequential, distributed, {"tp": size}, inputs, relation)


def variance_cases(size, count=16, suffix=""):
    around, moments = variance_of_parts_around_mean(count), variance_of_parts_by_moments(count)
    return [
        last_dim_case(f"variance-around-mean{suffix}", variance_around_mean, around, size, count, whole=True),
        last_dim_case(f"variance-by-moments{suffix}", variance_by_moments, moments, size, count, whole=True),
        last_dim_case(f"moments-for-mean{suffix}", variance_around_mean, moments, size, count, whole=True),
        last_dim_case(f"mean-for-moments{suffix}", variance_by_moments, around, size, count, whole=True),
    ]


def softmax_cases(size, count=16, suffix=""):
    shifts = {"max": true_max, "summed-max": summed_max, "no-shift": no_shift}
    cases = []
    for name, shift in shifts.items():
        by_hand, logs = split_softmax(shift), split_log_sum_exp(shift)
        cases += [
            last_dim_case(f"softmax-{name}{suffix}", softmax, by_hand, size, count),
            last_dim_case(f"softmax-by-hand-{name}{suffix}", softmax_by_hand, by_hand, size, count),
            last_dim_case(f"log-sum-exp-{name}{suffix}", log_sum_exp, logs, size, count, whole=True),
        ]
    return cases


def mean_case(name, distributed, size, rows=8):
    split = {"dp": Shard(0)}
    inputs, relation = {"x": gg.Input((rows, 3), split)}, {"y": {}, "grads.x": split}
    return Case(f"identities-{name}-{size}", mean, distributed, {"dp": size}, inputs, relation)


def bias_case(name, distributed, size, inner=8):
    column, row = {"tp": Shard(1)}, {"tp": Shard(0)}
    inputs = {
        "x": gg.Input((5, inner), column),
        "w": gg.Input((inner, 6), row),
        "b": gg.Input((6,)),
        "dy": gg.Input((5, 6)),
    }
    relation = {"y": {}, "grads.x": column, "grads.w": row, "grads.b": {}}
    return Case(f"identities-{name}-{size}", affine, distributed, {"tp": size}, inputs, relation)


def partial_case(name, sequential, distributed, size, **relation):
    inputs = {"x": gg.Input((5, 6), {"tp": Partial()}), "w": gg.Input((6, 7)), "dy": gg.Input((5, 7))}
    paths = {"y": relation.get("y", {}), "grads.x": {}, "grads.w": relation.get("w", {})}
    return Case(f"identities-{name}-{size}", sequential, distributed, {"tp": size}, inputs, paths)


def partial_cases(size):
    part = {"tp": Partial()}
    return [
        partial_case("partial-input", product, product_of_summands, size, w=part),
        partial_case("partial-input-and-output", product, product_of_summands_left_partial, size, y=part, w=part),
        partial_case("partial-input-activated", activated, summed_then_activated, size),
    ]


def correct(size):
    return [
        products_case("right-first", right_first, size),
        products_case("merged-weight", merged_weight, size),
        rows_case(size),
        columns_case(size),
        split_rows_case("two-products", sums_of_two_products, size),
        *variance_cases(size),
        *softmax_cases(size),
        mean_case("mean-of-means", mean_of_means, size),
        mean_case("mean-of-gathered-means", mean_of_gathered_means, size),
        bias_case("bias-on-first-rank", bias_on_first_rank, size),
        bias_case("masked-bias", masked_bias, size),
        bias_case("shared-bias", shared_bias, size),
        *partial_cases(size),
    ]


def uneven():
    return [
        products_case("right-first-uneven", right_first, 4, inner=10),
        rows_case(4, rows=7),
        split_rows_case("two-products-uneven", sums_of_two_products, 4, inner=7),
        bias_case("bias-on-first-rank-uneven", bias_on_first_rank, 4, inner=7),
        *variance_cases(4, 10, "-uneven"),
        *variance_cases(8, 8, "-one-each"),
        *softmax_cases(4, 10, "-uneven"),
        *softmax_cases(8, 8, "-one-each"),
    ]


def faults():
    square = rows_case(2, inner=6, out=6)
    sums = split_rows_case("", sums_of_two_products, 2)
    variance = last_dim_case("", variance_by_moments, variance_of_local_moments, 4, whole=True)
    weights, logs = last_dim_case("", softmax, softmax, 2), last_dim_case("", log_sum_exp, log_sum_exp, 4, whole=True)
    means = mean_case("", mean_of_means, 4, rows=7)
    bias = bias_case("", shared_bias, 4)
    summand = partial_case("", activated, summed_then_activated, 2)
    summands = partial_case("", product, product_of_summands, 2)
    rows, shift = "the ranks' means are over different numbers of rows", "another shift is added than was taken off"
    total = "a total is added to a summand, and summed again"
    everywhere, shares = "the bias is added on every rank, and summed", "the gradients of the shares are not summed"
    local = "variances around local means are averaged"
    return [
        faulty(square, "identities-fault-exchanged", exchanged_weights, "the weights are exchanged"),
        faulty(sums, "identities-fault-total-again", total_summed_again, total),
        faulty(variance, "identities-fault-local-moments", variance_of_local_moments, local),
        faulty(weights, "identities-fault-local-max", softmax_with_local_max, "summands with different shifts"),
        faulty(logs, "identities-fault-other-shift", log_sum_exp_with_summed_shift_once, shift),
        faulty(means, "identities-fault-unequal-means", mean_of_unequal_means, rows),
        faulty(bias, "identities-fault-bias-everywhere", bias_on_every_rank, everywhere),
        faulty(bias, "identities-fault-bias-shares", bias_gradient_of_shares, shares, stated=("*",)),
        faulty(summand, "identities-fault-activated-summand", activated_then_summed, "the activation of a summand"),
        faulty(summands, "identities-fault-summed-too-often", summed_too_often, "summed before and after the product"),
    ]


CASES = [*[case for size in (2, 4, 8) for case in correct(size)], *uneven(), *faults()]
