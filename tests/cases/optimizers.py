"""Optimizers that look at a whole matrix: what they need of it is summed over the shards."""

import torch
import torch.distributed as dist

from cases.case import Case, faulty
from cases.regions import gather_first, reduce_scatter_first
from graphguard import Input, Shard

RATE, DECAY, BOUND = 0.125, 0.1, 0.01
BATCHED = {"dp": Shard(0)}


def total(value):
    value = value.clone()
    dist.all_reduce(value)
    return value


def gradient(x, t, w):
    w = w.detach().requires_grad_()
    return torch.autograd.grad((torch.tanh(x @ w) - t).square().mean(), w)[0]


def gradient_of_rows(x, t, rows):
    return reduce_scatter_first(gradient(x, t, gather_first(rows, None)), None) / dist.get_world_size()


# ---------------------------------------------------------------------- rates by the norms of a layer
def lamb(x, t, w, mean, square):
    grad = gradient(x, t, w)
    mean, square = 0.9 * mean + 0.1 * grad, 0.99 * square + 0.01 * grad.square()
    update = mean / (square.sqrt() + 1e-6) + DECAY * w
    return {"w": w - RATE * (w.norm() / update.norm()) * update, "mean": mean, "square": square}


def lamb_sharded(x, t, w, mean, square):
    """Both norms in one message."""
    grad = gradient_of_rows(x, t, w)
    mean, square = 0.9 * mean + 0.1 * grad, 0.99 * square + 0.01 * grad.square()
    update = mean / (square.sqrt() + 1e-6) + DECAY * w
    weight_norm, update_norm = total(torch.stack([w.square().sum(), update.square().sum()])).sqrt()
    return {"w": w - RATE * (weight_norm / update_norm) * update, "mean": mean, "square": square}


def lamb_by_shard(x, t, w, mean, square):
    grad = gradient_of_rows(x, t, w)
    mean, square = 0.9 * mean + 0.1 * grad, 0.99 * square + 0.01 * grad.square()
    update = mean / (square.sqrt() + 1e-6) + DECAY * w
    scale = w.norm() / update.norm()  # fault: norms of the shard
    return {"w": w - RATE * scale * update, "mean": mean, "square": square}


def lamb_norms_added(x, t, w, mean, square):
    grad = gradient_of_rows(x, t, w)
    mean, square = 0.9 * mean + 0.1 * grad, 0.99 * square + 0.01 * grad.square()
    update = mean / (square.sqrt() + 1e-6) + DECAY * w
    weight_norm, update_norm = total(torch.stack([w.norm(), update.norm()]))  # fault: norms do not add up
    return {"w": w - RATE * (weight_norm / update_norm) * update, "mean": mean, "square": square}


# ---------------------------------------------------------------------- second moments in rows and columns
def factored(x, t, w, rows, cols):
    squares = gradient(x, t, w).square() + 1e-6
    rows, cols = 0.9 * rows + 0.1 * squares.mean(1), 0.9 * cols + 0.1 * squares.mean(0)
    scale = torch.outer(rows / rows.mean(), cols).rsqrt()
    return {"w": w - RATE * gradient(x, t, w) * scale, "rows": rows, "cols": cols}


def factored_with(column_means, mean_of_rows):
    def program(x, t, w, rows, cols):
        grad = gradient_of_rows(x, t, w)
        squares = grad.square() + 1e-6
        rows, cols = 0.9 * rows + 0.1 * squares.mean(1), 0.9 * cols + 0.1 * column_means(squares)
        scale = torch.outer(rows / mean_of_rows(rows), cols).rsqrt()
        return {"w": w - RATE * grad * scale, "rows": rows, "cols": cols}

    return program


def over_ranks(value):
    return total(value.mean(0)) / dist.get_world_size()


def of_shard(value):
    return value.mean(0)  # fault: the mean over this rank's rows


def of_shard_again(value):
    return value.mean(0)  # fault: rows are compared with those of this rank


def added(value):
    return total(value.mean(0))  # fault: a sum of means


# ---------------------------------------------------------------------- gradients in a smaller range
SCALE = 1024.0


def plain_step(x, t, w):
    return {"w": w - RATE * gradient(x, t, w)}


def scaled_step(x, t, w):
    """The loss is scaled up, and the update down; it is skipped if any rank has a number that is not finite."""
    live = w.detach().requires_grad_()
    grad = torch.autograd.grad((torch.tanh(x @ live) - t).square().mean() * SCALE, live)[0]
    return {"w": w - RATE * total(grad) / (SCALE * dist.get_world_size())}


def unscaled_twice(x, t, w):
    live = w.detach().requires_grad_()
    grad = torch.autograd.grad((torch.tanh(x @ live) - t).square().mean() * SCALE, live)[0] / SCALE
    return {"w": w - RATE * total(grad) / (SCALE * dist.get_world_size())}  # fault: the scale was taken out before


def clipped_before_unscaling(x, t, w):
    live = w.detach().requires_grad_()
    grad = torch.autograd.grad((torch.tanh(x @ live) - t).square().mean() * SCALE, live)[0]
    grad = (total(grad) / dist.get_world_size()).clamp(-BOUND, BOUND)  # fault: the bound is for gradients without scale
    return {"w": w - RATE * grad / SCALE}


def clipped_by_value(x, t, w):
    return {"w": w - RATE * gradient(x, t, w).clamp(-BOUND, BOUND)}


def clipped_after_reduction(x, t, w):
    return {"w": w - RATE * (total(gradient(x, t, w)) / dist.get_world_size()).clamp(-BOUND, BOUND)}


def clipped_on_each(x, t, w):
    return {
        "w": w - RATE * total(gradient(x, t, w).clamp(-BOUND, BOUND)) / dist.get_world_size()  # fault: clipped before the sum
    }


# ---------------------------------------------------------------------- cases
def case_of(name, sequential, distributed, dp, state, split):
    inputs = {"x": Input((8, 8), BATCHED), "t": Input((8, 6), BATCHED)}
    positive = dict.fromkeys(("square", "rows", "cols"), 0)
    inputs |= {key: Input(shape, BATCHED if key in split else {}, low=positive.get(key)) for key, shape in state.items()}
    relation = {key: BATCHED if key in split else {} for key in state}
    return Case(f"optimizers-{name}-dp{dp}", sequential, distributed, {"dp": dp}, inputs, relation)


def lamb_case(name, distributed, dp):
    state = dict.fromkeys(("w", "mean", "square"), (8, 6))
    return case_of(name, lamb, distributed, dp, state, state)


def factored_case(name, distributed, dp):
    return case_of(name, factored, distributed, dp, {"w": (8, 6), "rows": (8,), "cols": (6,)}, ("w", "rows"))


def correct():
    for dp in (2, 4):
        yield lamb_case("lamb", lamb_sharded, dp)
        yield factored_case("factored", factored_with(over_ranks, over_ranks), dp)
        yield case_of("scaled", plain_step, scaled_step, dp, {"w": (8, 6)}, ())
        yield case_of("clipped", clipped_by_value, clipped_after_reduction, dp, {"w": (8, 6)}, ())


def faults():
    base = lamb_case("", lamb_sharded, 2)
    yield faulty(base, "optimizers-fault-norms", lamb_by_shard, "norms of the shard")
    yield faulty(base, "optimizers-fault-added-norms", lamb_norms_added, "norms do not add up")
    base = factored_case("", None, 2)
    yield faulty(base, "optimizers-fault-columns", factored_with(of_shard, over_ranks), "the mean over this rank's rows")
    local = factored_with(over_ranks, of_shard_again)
    yield faulty(base, "optimizers-fault-rows", local, "rows are compared with those of this rank")
    yield faulty(base, "optimizers-fault-sum-of-means", factored_with(added, over_ranks), "a sum of means")
    base = case_of("", plain_step, None, 2, {"w": (8, 6)}, ())
    yield faulty(base, "optimizers-fault-unscaled", unscaled_twice, "the scale was taken out before")
    base = case_of("", clipped_by_value, None, 2, {"w": (8, 6)}, ())
    yield faulty(base, "optimizers-fault-clipped", clipped_on_each, "clipped before the sum")
    yield faulty(base, "optimizers-fault-clipped-scaled", clipped_before_unscaling, "the bound is for gradients without scale")


CASES = [*correct(), *faults()]
