"""One flat buffer for parameters of one, two and three dims, cut without regard to where they begin: FSDP's and ZeRO's."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.leaves import gradients, leaves
from cases.regions import gather_first, reduce_scatter_first
from graphguard import Input, Shard

SHAPES = {"inner": (4, 5), "bias": (5,), "experts": (2, 5, 3), "scale": (3,)}  # 58 elements: shards end inside of them
RATE, MOMENTUM, LARGEST = 0.125, 0.5, 0.25


def errors(x, t, inner, bias, experts, scale):
    h = torch.tanh(x @ inner + bias)
    return (torch.einsum("bh,ehk->bk", h, experts) * scale - t).square()


def mean_gradients(x, t, params):
    live = leaves(params)
    return gradients(errors(x, t, **live).mean(), live)


def flat(tensors, size):
    """All elements, padded so that they divide."""
    row = torch.cat([tensor.flatten() for tensor in tensors])
    return F.pad(row, (0, -row.numel() % size))


def views(row, shapes):
    """The parameters in a flat buffer."""
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    parts = row[: sum(sizes)].split(sizes)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def own(row):
    return row.chunk(dist.get_world_size())[dist.get_rank()]


# ---------------------------------------------------------------------- gradients, fully sharded
def flat_gradient(x, t, size, **params):
    return flat(mean_gradients(x, t, params).values(), size)


def shard_of_all(full, coord, size):
    """A rank's samples, and its shard of the buffer."""
    row = flat([full[name] for name in SHAPES], size)
    return {key: full[key].chunk(size)[coord["dp"]] for key in "xt"} | {"shard": row.chunk(size)[coord["dp"]]}


def fully_sharded(x, t, shard, shapes=SHAPES):
    size = dist.get_world_size()
    params = views(gather_first(shard, None), shapes)
    grads = mean_gradients(x, t, params)
    return reduce_scatter_first(flat([grads[name] for name in SHAPES], size), None) / size


def fully_sharded_renamed(x, t, shard):
    """The buffer was packed with the bias behind the experts."""
    shapes = {name: SHAPES[name] for name in ("inner", "experts", "bias", "scale")}
    size = dist.get_world_size()
    params = views(gather_first(shard, None), shapes)  # fault: the views are in another order than what was packed
    grads = mean_gradients(x, t, params)
    return reduce_scatter_first(flat([grads[name] for name in SHAPES], size), None) / size


def fully_sharded_padded_in_front(x, t, shard):
    size = dist.get_world_size()
    params = views(gather_first(shard, None), SHAPES)
    row = torch.cat([grad.flatten() for grad in mean_gradients(x, t, params).values()])
    row = F.pad(row, (-row.numel() % size, 0))  # fault: the padding of gradients comes first, that of parameters last
    return reduce_scatter_first(row, None) / size


# ---------------------------------------------------------------------- two steps with momentum, state and update on shards
def trained(x, t, **params):
    momentum = {name: torch.zeros_like(p) for name, p in params.items()}
    for batch, target in zip(x, t, strict=True):
        grads = mean_gradients(batch, target, params)
        momentum = {name: MOMENTUM * momentum[name] + grads[name] for name in params}
        params = {name: p - RATE * momentum[name] for name, p in params.items()}
    return params


class Bucket:
    """Some parameters, and this rank's shard of their momentum."""

    def __init__(self, names):
        self.names, self.momentum = names, 0

    def step(self, params, grads):
        size = dist.get_world_size()
        mine = reduce_scatter_first(flat([grads[name] for name in self.names], size), None) / size
        self.momentum = MOMENTUM * self.momentum + mine
        weights = own(flat([params[name] for name in self.names], size)) - RATE * self.momentum
        return views(gather_first(weights, None), {name: params[name].shape for name in self.names})


class BucketOfOneRank(Bucket):
    def step(self, params, grads):
        size = dist.get_world_size()
        mine = own(flat([grads[name] for name in self.names], size))  # fault: the shard of this rank's own gradient
        weights = own(flat([params[name] for name in self.names], size)) - RATE * mine
        return views(gather_first(weights, None), {name: params[name].shape for name in self.names})


class BucketWithMeansSummed(Bucket):
    def step(self, params, grads):
        size = dist.get_world_size()
        mine = reduce_scatter_first(flat([grads[name] for name in self.names], size), None)  # fault: a sum of means
        self.momentum = MOMENTUM * self.momentum + mine
        weights = own(flat([params[name] for name in self.names], size)) - RATE * self.momentum
        return views(gather_first(weights, None), {name: params[name].shape for name in self.names})


def trained_in(x, t, buckets, kind=Bucket, **params):
    made = [kind(names) for names in buckets]
    for batch, target in zip(x, t, strict=True):
        grads = mean_gradients(batch, target, params)
        params = {name: p for bucket in made for name, p in bucket.step(params, grads).items()}
    return params


# ---------------------------------------------------------------------- a step with clipped gradients
def clipped(x, t, **params):
    grads = mean_gradients(x, t, params)
    norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
    scale = (LARGEST / (norm + 1e-6)).clamp(max=1.0)
    return {name: p - RATE * scale * grads[name] for name, p in params.items()}


def clipped_on_shards(x, t, **params):
    size = dist.get_world_size()
    mine = reduce_scatter_first(flat(mean_gradients(x, t, params).values(), size), None) / size
    square = mine.square().sum()
    dist.all_reduce(square)
    scale = (LARGEST / (square.sqrt() + 1e-6)).clamp(max=1.0)
    weights = own(flat(params.values(), size)) - RATE * scale * mine
    return views(gather_first(weights, None), SHAPES)


def clipped_by_own_norm(x, t, **params):
    size = dist.get_world_size()
    mine = reduce_scatter_first(flat(mean_gradients(x, t, params).values(), size), None) / size
    square = mine.square().sum()
    scale = (LARGEST / (square.sqrt() + 1e-6)).clamp(max=1.0)  # fault: the norm of this rank's shard alone
    weights = own(flat(params.values(), size)) - RATE * scale * mine
    return views(gather_first(weights, None), SHAPES)


# ---------------------------------------------------------------------- cases
ONE_BUCKET = [tuple(SHAPES)]
TWO_BUCKETS = [("scale", "experts"), ("bias", "inner")]


def inputs(size, steps=None):
    lead, at = ((), 0) if steps is None else ((steps,), 1)
    split = {"dp": Shard(at)}
    samples = max(8, size)
    data = {"x": Input((*lead, samples, 4), split), "t": Input((*lead, samples, 3), split)}
    return data | {name: Input(shape) for name, shape in SHAPES.items()}


def gradient_case(name, size, program):
    whole = {name: Input(given.shape) for name, given in inputs(size).items()}
    return Case(
        f"flat-{name}-dp{size}", functools.partial(flat_gradient, size=size), program, {"dp": size}, whole,
        {"out": {"dp": Shard(0)}}, local_inputs=functools.partial(shard_of_all, size=size),
    )  # fmt: skip


def step_case(name, size, buckets, steps=2):
    program = functools.partial(trained_in, buckets=buckets)
    return Case(f"flat-{name}-dp{size}", trained, program, {"dp": size}, inputs(size, steps), {key: {} for key in SHAPES})


def clipped_case(size):
    return Case(
        f"flat-clipped-dp{size}", clipped, clipped_on_shards, {"dp": size}, inputs(size), {key: {} for key in SHAPES}
    )  # fmt: skip


def faults():
    gradient, step, clip = gradient_case("", 4, fully_sharded), step_case("", 2, TWO_BUCKETS), clipped_case(4)

    def stepped(kind):
        return functools.partial(trained_in, buckets=TWO_BUCKETS, kind=kind)

    return [
        faulty(
            gradient, "flat-fault-order", fully_sharded_renamed, "the views are in another order than what was packed"
        ),
        faulty(
            gradient, "flat-fault-padding", fully_sharded_padded_in_front,
            "the padding of gradients comes first, that of parameters last",
        ),
        faulty(step, "flat-fault-own", stepped(BucketOfOneRank), "the shard of this rank's own gradient"),
        faulty(step, "flat-fault-summed", stepped(BucketWithMeansSummed), "a sum of means"),
        faulty(clip, "flat-fault-norm", clipped_by_own_norm, "the norm of this rank's shard alone"),
    ]  # fmt: skip


CASES = [
    *[case for size in (2, 4, 8) for case in (
        gradient_case("gradient", size, fully_sharded),
        step_case("one-bucket", size, ONE_BUCKET),
        step_case("two-buckets", size, TWO_BUCKETS),
        clipped_case(size),
    )],
    step_case("two-buckets", 16, TWO_BUCKETS),
    *faults(),
]  # fmt: skip
