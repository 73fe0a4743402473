"""Statistics of a batch that is split, in equal parts and in unequal ones; gradients that wait for the last microbatch."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.leaves import gradients, leaves
from graphguard import Input, Shard

EPS, MOMENTUM = 1e-5, 0.1
BATCHED = {"dp": Shard(0)}


def total(value, group=None):
    value = value.detach().clone()
    dist.all_reduce(value, group=group)
    return value


# ---------------------------------------------------------------------- batch norm
def batch_norm(x, scale, shift, mean, var, dy):
    p = leaves({"x": x, "scale": scale, "shift": shift})
    y = F.batch_norm(p["x"], mean, var, p["scale"], p["shift"], training=True, momentum=MOMENTUM, eps=EPS)
    return {"y": y.detach(), "mean": mean, "var": var, "grads": gradients(y, p, dy)}


def batch_norm_by_hand(x, scale, shift, mean, var, dy):
    p = leaves({"x": x, "scale": scale, "shift": shift})
    count = x.size(0)
    middle = p["x"].mean(0)
    spread = (p["x"] - middle).square().mean(0)
    y = (p["x"] - middle) * torch.rsqrt(spread + EPS) * p["scale"] + p["shift"]
    mean = (1 - MOMENTUM) * mean + MOMENTUM * middle.detach()
    var = (1 - MOMENTUM) * var + MOMENTUM * spread.detach() * count / (count - 1)
    return {"y": y.detach(), "mean": mean, "var": var, "grads": gradients(y, p, dy)}


class Totals(torch.autograd.Function):
    """A sum over the ranks, each of which uses it for its own samples: the gradients are summed too."""

    @staticmethod
    def forward(ctx, x):
        return total(x)

    @staticmethod
    def backward(ctx, grad):
        return total(grad)


def synchronised_with(statistics):
    def program(x, scale, shift, mean, var, dy):
        p = leaves({"x": x, "scale": scale, "shift": shift})
        count, middle, spread = statistics(p["x"])
        y = (p["x"] - middle) * torch.rsqrt(spread + EPS) * p["scale"] + p["shift"]
        mean = (1 - MOMENTUM) * mean + MOMENTUM * middle.detach()
        var = (1 - MOMENTUM) * var + MOMENTUM * spread.detach() * count / (count - 1)
        grads = gradients(y, p, dy)
        grads |= {name: total(grads[name]) for name in ("scale", "shift")}
        return {"y": y.detach(), "mean": mean, "var": var, "grads": grads}

    return program


def in_two_passes(x):
    """First the mean, then the squares of what is left of it."""
    count = total(torch.tensor(float(x.size(0))))
    middle = Totals.apply(x.sum(0)) / count
    return count, middle, Totals.apply((x - middle).square().sum(0)) / count


def in_one_pass(x):
    """Sums and sums of squares in one message."""
    sums = Totals.apply(torch.cat([x.sum(0), x.square().sum(0), torch.full((1,), float(x.size(0)))]))
    first, second, count = sums.split([x.size(1), x.size(1), 1])
    middle = first / count
    return count.detach(), middle, second / count - middle.square()


class SyncedNorm(torch.autograd.Function):
    """With its backward by hand, as libraries have it: two sums in one message."""

    @staticmethod
    def forward(ctx, x, scale, shift):
        sums = total(torch.cat([x.sum(0), x.square().sum(0), torch.full((1,), float(x.size(0)))]))
        first, second, count = sums.split([x.size(1), x.size(1), 1])
        middle = first / count
        inverse = torch.rsqrt(second / count - middle.square() + EPS)
        ctx.save_for_backward(x, scale, middle, inverse, count)
        return (x - middle) * inverse * scale + shift

    @staticmethod
    def backward(ctx, dy):
        x, scale, middle, inverse, count = ctx.saved_tensors
        centred = x - middle
        dscale, dshift = (dy * centred * inverse).sum(0), dy.sum(0)
        sum_dy, sum_dy_x = total(torch.cat([dshift, (dy * centred).sum(0)])).chunk(2)
        dx = (dy - sum_dy / count - centred * inverse.square() * sum_dy_x / count) * inverse * scale
        return dx, dscale, dshift


def synced_norm_with(apply):
    def program(x, scale, shift, mean, var, dy):
        p = leaves({"x": x, "scale": scale, "shift": shift})
        y = apply(p["x"], p["scale"], p["shift"])
        grads = gradients(y, p, dy)
        return {"y": y.detach(), "grads": grads | {name: total(grads[name]) for name in ("scale", "shift")}}

    return program


def only_output(program):
    def shorter(**inputs):
        result = program(**inputs)
        return {"y": result["y"], "grads": result["grads"]}

    return shorter


class LocalSumsBackward(SyncedNorm):
    @staticmethod
    def backward(ctx, dy):
        x, scale, middle, inverse, count = ctx.saved_tensors
        centred = x - middle
        dscale, dshift = (dy * centred * inverse).sum(0), dy.sum(0)
        sum_dy_x = (dy * centred).sum(0)
        dx = dy - dshift / count - centred * inverse.square() * sum_dy_x / count  # fault: sums of this rank's samples
        return dx * inverse * scale, dscale, dshift


def means_of_equal_parts(x):
    size = dist.get_world_size()
    middle = Totals.apply(x.mean(0)) / size  # fault: ranks with fewer samples weigh as much
    return total(torch.tensor(float(x.size(0)))), middle, Totals.apply((x - middle).square().mean(0)) / size


def means_of_variances(x):
    count = total(torch.tensor(float(x.size(0))))
    middle = Totals.apply(x.sum(0)) / count
    own = (x - x.mean(0)).square().sum(0)  # fault: around the mean of this rank
    return count, middle, Totals.apply(own) / count


def own_count(x):
    count = total(torch.tensor(float(x.size(0))))
    middle = Totals.apply(x.sum(0)) / count
    spread = Totals.apply((x - middle).square().sum(0)) / count
    return torch.tensor(float(x.size(0))), middle, spread  # fault: the running variance is corrected by this rank's count


def norm_case(name, sequential, distributed, dp, batch, state=True):
    data = {"x": Input((batch, 3), BATCHED), "dy": Input((batch, 3), BATCHED)}
    inputs = data | {key: Input((3,)) for key in ("scale", "shift", "mean", "var")}
    kept = {"mean": {}, "var": {}} if state else {}
    relation = {"y": BATCHED, **kept, "grads.x": BATCHED, "grads.scale": {}, "grads.shift": {}}
    return Case(f"batch-norm-{name}-{batch}-on-{dp}", sequential, distributed, {"dp": dp}, inputs, relation)


def norm_cases():
    two, one = synchronised_with(in_two_passes), synchronised_with(in_one_pass)
    backward = synced_norm_with(SyncedNorm.apply)
    for dp, batch in ((2, 7), (4, 8), (4, 7)):
        yield norm_case("two-passes", batch_norm_by_hand, two, dp, batch)
        yield norm_case("one-pass", batch_norm_by_hand, one, dp, batch)
        yield norm_case("torch-two-passes", batch_norm, two, dp, batch)
        yield norm_case("backward", only_output(batch_norm_by_hand), backward, dp, batch, state=False)
        yield norm_case("torch-backward", only_output(batch_norm), backward, dp, batch, state=False)


def norm_faults():
    base = norm_case("", batch_norm_by_hand, None, 2, 7)
    equal = norm_case("", batch_norm_by_hand, None, 2, 8)
    short = norm_case("", only_output(batch_norm_by_hand), None, 2, 7, state=False)
    of_means, of_variances = synchronised_with(means_of_equal_parts), synchronised_with(means_of_variances)
    yield faulty(base, "batch-fault-means", of_means, "ranks with fewer samples weigh as much")
    yield faulty(equal, "batch-fault-variances", of_variances, "around the mean of this rank")
    yield faulty(
        base, "batch-fault-count", synchronised_with(own_count), "the running variance is corrected by this rank's count"
    )
    yield faulty(
        short, "batch-fault-backward", synced_norm_with(LocalSumsBackward.apply), "sums of this rank's samples"
    )  # fmt: skip


# ---------------------------------------------------------------------- gradients that wait
class Replicated:
    """Averages gradients in hooks, as a wrapper of a module does, unless it is told to wait."""

    def __init__(self, weights):
        self.weights, self.waits = weights, False
        for weight in weights.values():
            weight.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, weight):
        if not self.waits:
            dist.all_reduce(weight.grad, op=dist.ReduceOp.AVG)

    @contextlib.contextmanager
    def no_sync(self):
        self.waits = True
        yield
        self.waits = False


def errors(x, t, w1, b1, w2):
    return (torch.tanh(x @ w1 + b1) @ w2 - t).square()


def whole_batch(x, t, **params):
    p = leaves(params)
    return gradients(errors(x, t, **p).mean(), p)


def waiting(x, t, **params):
    p = leaves(params)
    wrapper = Replicated(p)
    *early, last = zip(x.chunk(4), t.chunk(4), strict=True)
    with wrapper.no_sync():
        for part, target in early:
            (errors(part, target, **p).mean() / 4).backward()
    (errors(last[0], last[1], **p).mean() / 4).backward()
    return {name: weight.grad for name, weight in p.items()}


def waiting_to_the_end(x, t, **params):
    p = leaves(params)
    wrapper = Replicated(p)
    with wrapper.no_sync():
        for part, target in zip(x.chunk(4), t.chunk(4), strict=True):
            (errors(part, target, **p).mean() / 4).backward()  # fault: the last microbatch waits too
    return {name: weight.grad for name, weight in p.items()}


def not_divided(x, t, **params):
    p = leaves(params)
    wrapper = Replicated(p)
    *early, last = zip(x.chunk(4), t.chunk(4), strict=True)
    with wrapper.no_sync():
        for part, target in early:
            errors(part, target, **p).mean().backward()
    errors(last[0], last[1], **p).mean().backward()  # fault: a sum of means of microbatches
    return {name: weight.grad for name, weight in p.items()}


def zeroed_between(x, t, **params):
    p = leaves(params)
    wrapper = Replicated(p)
    *early, last = zip(x.chunk(4), t.chunk(4), strict=True)
    with wrapper.no_sync():
        for part, target in early:
            (errors(part, target, **p).mean() / 4).backward()
    for weight in p.values():
        weight.grad = None
    (errors(last[0], last[1], **p).mean() / 4).backward()  # fault: the earlier gradients are gone
    return {name: weight.grad for name, weight in p.items()}


def remainder_dropped(x, t, **params):
    p = leaves(params)
    wrapper = Replicated(p)
    parts = list(zip(x.split(3), t.split(3), strict=True))[:-1]
    with wrapper.no_sync():
        for part, target in parts[:-1]:
            (errors(part, target, **p).mean() / len(parts)).backward()
    (errors(*parts[-1], **p).mean() / len(parts)).backward()  # fault: the last samples are in no microbatch
    return {name: weight.grad for name, weight in p.items()}


def waiting_case(name, distributed, dp):
    shapes = {"w1": (5, 7), "b1": (7,), "w2": (7, 3)}
    inputs = {"x": Input((16, 5), BATCHED), "t": Input((16, 3), BATCHED)} | {key: Input(shape) for key, shape in shapes.items()}
    return Case(f"batch-{name}-dp{dp}", whole_batch, distributed, {"dp": dp}, inputs, {key: {} for key in shapes})


def waiting_faults():
    base = waiting_case("", waiting, 2)
    yield faulty(base, "batch-fault-all-wait", waiting_to_the_end, "the last microbatch waits too", stated=("*",))
    yield faulty(base, "batch-fault-not-divided", not_divided, "a sum of means of microbatches")
    yield faulty(base, "batch-fault-zeroed", zeroed_between, "the earlier gradients are gone")
    yield faulty(base, "batch-fault-remainder", remainder_dropped, "the last samples are in no microbatch")


CASES = [
    *norm_cases(), *norm_faults(), waiting_case("no-sync", waiting, 2), waiting_case("no-sync", waiting, 4), *waiting_faults(),
]  # fmt: skip
