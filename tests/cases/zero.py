"""Data parallelism to the end of the step: optimizers, over one and two steps, with their state whole or sharded (ZeRO)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.leaves import gradients, leaves
from cases.regions import gather_first, reduce_scatter_first
from graphguard import Input, Shard

ROWS = {"w1": (8, 8), "b1": (8,), "w2": (8, 3)}  # the first dim divides by every number of ranks
RATE = 0.125


def errors(x, t, w1, b1, w2):
    return (torch.tanh(x @ w1 + b1) @ w2 - t).square()


def mean_gradients(x, t, params):
    """Of the mean over the samples that are here."""
    live = leaves(params)
    return gradients(errors(x, t, **live).mean(), live)


def own_rows(tensor):
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def averaged(grads):
    for grad in grads.values():
        dist.all_reduce(grad)
    return {name: grad / dist.get_world_size() for name, grad in grads.items()}


# ---------------------------------------------------------------------- optimizers, by hand
class Sgd:
    def update(self, name, weight, grad):
        return weight - RATE * grad


class Momentum:
    def __init__(self):
        self.buffers = {}

    def update(self, name, weight, grad):
        self.buffers[name] = 0.9 * self.buffers[name] + grad if name in self.buffers else grad
        return weight - RATE * self.buffers[name]


class Adam:
    decay, decoupled, keep = 0.0, False, 0.99

    def __init__(self):
        self.state = {}

    def update(self, name, weight, grad):
        step, mean, square = self.state.get(name, (0, torch.zeros_like(weight), torch.zeros_like(weight)))
        if self.decay and self.decoupled:
            weight = weight * (1 - RATE * self.decay)
        elif self.decay:
            grad = grad + self.decay * weight
        step, mean, square = step + 1, 0.9 * mean + 0.1 * grad, self.keep * square + (1 - self.keep) * grad * grad
        self.state[name] = step, mean, square
        mean, square = mean / (1 - 0.9**step), square / (1 - self.keep**step)
        return weight - RATE * mean / (square.sqrt() + 1e-8)


class AdamWithDecay(Adam):
    decay = 0.1


class AdamW(Adam):
    decay, decoupled = 0.1, True


class AdamAsTorch(Adam):
    keep = 0.999


class AdamWAsTorch(AdamW):
    keep = 0.999


class RmsProp:
    def __init__(self):
        self.squares = {}

    def update(self, name, weight, grad):
        self.squares[name] = 0.99 * self.squares.get(name, 0) + 0.01 * grad * grad
        return weight - RATE * grad / (self.squares[name].sqrt() + 1e-8)


class AdamUncorrected(AdamAsTorch):
    def update(self, name, weight, grad):
        mean, square = self.state.get(name, (0, 0))
        mean, square = self.state[name] = 0.9 * mean + 0.1 * grad, 0.999 * square + 0.001 * grad * grad
        return weight - RATE * mean / (square.sqrt() + 1e-8)  # fault: means that begin at zero are not corrected


BY_HAND = {"sgd": Sgd, "momentum": Momentum, "adam": Adam, "adam-decay": AdamWithDecay, "adamw": AdamW}


def trained(make):
    """x, t: [step, sample, feature]."""

    def program(x, t, **params):
        optimizer = make()
        for batch, target in zip(x, t, strict=True):
            grads = mean_gradients(batch, target, params)
            params = {name: optimizer.update(name, weight, grads[name]) for name, weight in params.items()}
        return params

    return program


def replicated(make):
    """Every rank has the whole state and makes the same update."""

    def program(x, t, **params):
        optimizer = make()
        for batch, target in zip(x, t, strict=True):
            grads = averaged(mean_gradients(batch, target, params))
            params = {name: optimizer.update(name, weight, grads[name]) for name, weight in params.items()}
        return params

    return program


def zero1(make):
    """Whole gradients; each rank has the state of its rows, updates these, and all rows are gathered."""

    def program(x, t, **params):
        optimizer = make()
        for batch, target in zip(x, t, strict=True):
            grads = averaged(mean_gradients(batch, target, params))
            rows = {name: optimizer.update(name, own_rows(weight), own_rows(grads[name])) for name, weight in params.items()}
            params = {name: gather_first(row, None) for name, row in rows.items()}
        return params

    return program


def zero2(make):
    """Gradients are reduced and scattered."""

    def program(x, t, **params):
        optimizer, size = make(), dist.get_world_size()
        for batch, target in zip(x, t, strict=True):
            grads = mean_gradients(batch, target, params)
            for name, weight in params.items():
                grad = reduce_scatter_first(grads[name], None) / size
                params[name] = gather_first(optimizer.update(name, own_rows(weight), grad), None)
        return params

    return program


def zero3(make):
    """Parameters are sharded too, and whole only while they are used."""

    def program(x, t, **params):
        optimizer, size = make(), dist.get_world_size()
        for batch, target in zip(x, t, strict=True):
            grads = mean_gradients(batch, target, {name: gather_first(rows, None) for name, rows in params.items()})
            grads = {name: reduce_scatter_first(grad, None) / size for name, grad in grads.items()}
            params = {name: optimizer.update(name, rows, grads[name]) for name, rows in params.items()}
        return params

    return program


def packed(tensors, size):
    """One row of all elements, padded to a length that divides."""
    row = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return F.pad(row, (0, -row.numel() % size))


def unpacked(row, like):
    used = sum(tensor.numel() for tensor in like.values())
    parts = row[:used].split([tensor.numel() for tensor in like.values()])
    return {name: part.view_as(like[name]) for name, part in zip(like, parts, strict=True)}


def flat_zero2(make):
    """All parameters in one padded row, which is cut without regard to where they begin."""

    def program(x, t, **params):
        optimizer, size = make(), dist.get_world_size()
        for batch, target in zip(x, t, strict=True):
            grads = packed(mean_gradients(batch, target, params).values(), size)
            own = own_rows(packed(params.values(), size))
            own = optimizer.update("row", own, reduce_scatter_first(grads, None) / size)
            params = unpacked(gather_first(own, None), params)
        return params

    return program


# ---------------------------------------------------------------------- optimizers of torch
OF_TORCH = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=RATE),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=RATE, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda weights: torch.optim.SGD(weights, lr=RATE, momentum=0.9, nesterov=True),
    "adam": lambda weights: torch.optim.Adam(weights, lr=RATE),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=RATE, weight_decay=0.1),
    "fused-adamw": lambda weights: torch.optim.AdamW(weights, lr=RATE, weight_decay=0.1, fused=True),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=RATE),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=RATE),
    "nadam": lambda weights: torch.optim.NAdam(weights, lr=RATE),
    "radam": lambda weights: torch.optim.RAdam(weights, lr=RATE),
    "adamax": lambda weights: torch.optim.Adamax(weights, lr=RATE),
    "adadelta": lambda weights: torch.optim.Adadelta(weights, lr=RATE),
    "rprop": lambda weights: torch.optim.Rprop(weights, lr=RATE),
    "asgd": lambda weights: torch.optim.ASGD(weights, lr=RATE),
}
IN_ONE_CALL = {  # the same, for all parameters at once
    "adam": lambda weights: torch.optim.Adam(weights, lr=RATE, foreach=True),
    "adamax": lambda weights: torch.optim.Adamax(weights, lr=RATE, foreach=True),
    "adadelta": lambda weights: torch.optim.Adadelta(weights, lr=RATE, foreach=True),
    "rprop": lambda weights: torch.optim.Rprop(weights, lr=RATE, foreach=True),
}


AS_TORCH = {
    "sgd": Sgd,
    "adam": AdamAsTorch,
    "adamw": AdamWAsTorch,
    "fused-adamw": AdamWAsTorch,
    "rmsprop": RmsProp,
}  # by hand what torch does


def finished(weights):
    return {name: weight.detach() for name, weight in weights.items()}


def trained_by(make):
    def program(x, t, **params):
        weights = {name: torch.nn.Parameter(weight) for name, weight in params.items()}
        optimizer = make(weights.values())
        for batch, target in zip(x, t, strict=True):
            optimizer.zero_grad()
            errors(batch, target, **weights).mean().backward()
            optimizer.step()
        return finished(weights)

    return program


def replicated_by(make):
    def program(x, t, **params):
        weights = {name: torch.nn.Parameter(weight) for name, weight in params.items()}
        optimizer = make(weights.values())
        for batch, target in zip(x, t, strict=True):
            optimizer.zero_grad()
            errors(batch, target, **weights).mean().backward()
            for weight in weights.values():
                dist.all_reduce(weight.grad, op=dist.ReduceOp.AVG)
            optimizer.step()
        return finished(weights)

    return program


def zero2_by(make):
    def program(x, t, **params):
        weights = {name: torch.nn.Parameter(weight) for name, weight in params.items()}
        shards = {name: torch.nn.Parameter(own_rows(weight.detach()).clone()) for name, weight in weights.items()}
        optimizer = make(shards.values())
        for batch, target in zip(x, t, strict=True):
            errors(batch, target, **weights).mean().backward()
            for name, weight in weights.items():
                shards[name].grad = reduce_scatter_first(weight.grad, None) / dist.get_world_size()
                weight.grad = None
            optimizer.step()
            with torch.no_grad():
                for name, weight in weights.items():
                    dist.all_gather_into_tensor(weight, shards[name].detach())
        return finished(weights)

    return program


# ---------------------------------------------------------------------- faults
def zero1_without_gather(x, t, **params):
    optimizer = Adam()
    for batch, target in zip(x, t, strict=True):
        grads = averaged(mean_gradients(batch, target, params))
        for name, weight in params.items():
            rows = optimizer.update(name, own_rows(weight), own_rows(grads[name]))
            own_rows(weight).copy_(rows)  # fault: the other ranks' rows stay as they were
    return params


def zero1_neighbours_gradient(x, t, **params):
    optimizer, size = Adam(), dist.get_world_size()
    for batch, target in zip(x, t, strict=True):
        grads = averaged(mean_gradients(batch, target, params))
        for name, weight in params.items():
            grad = grads[name].chunk(size)[(dist.get_rank() + 1) % size]  # fault: the next rank's rows of the gradient
            params[name] = gather_first(optimizer.update(name, own_rows(weight), grad), None)
    return params


def zero2_summed(x, t, **params):
    optimizer = AdamW()
    for batch, target in zip(x, t, strict=True):
        grads = mean_gradients(batch, target, params)
        for name, weight in params.items():
            grad = reduce_scatter_first(grads[name], None)  # fault: a sum of means, not their mean
            params[name] = gather_first(optimizer.update(name, own_rows(weight), grad), None)
    return params


def zero2_local_gradient(x, t, **params):
    optimizer = Momentum()
    for batch, target in zip(x, t, strict=True):
        grads = mean_gradients(batch, target, params)
        for name, weight in params.items():
            grad = own_rows(grads[name])  # fault: the rows of the gradient are not reduced
            params[name] = gather_first(optimizer.update(name, own_rows(weight), grad), None)
    return params


def zero3_decayed_by_ranks(x, t, **params):
    """The decay of an AdamW whose every rank takes its share of the rate."""
    size = dist.get_world_size()
    for batch, target in zip(x, t, strict=True):
        grads = mean_gradients(batch, target, {name: gather_first(rows, None) for name, rows in params.items()})
        grads = {name: reduce_scatter_first(grad, None) / size for name, grad in grads.items()}
        for name, rows in params.items():
            decayed = rows * (1 - RATE * 0.1 / size)  # fault: the decay is divided by the number of ranks
            params[name] = decayed - RATE * grads[name]
    return params


class DecayedSgd:
    def update(self, name, weight, grad):
        return weight * (1 - RATE * 0.1) - RATE * grad


def replicated_by_adam_before_reduction(x, t, **params):
    weights = {name: torch.nn.Parameter(weight) for name, weight in params.items()}
    optimizer = torch.optim.Adam(weights.values(), lr=RATE)
    for batch, target in zip(x, t, strict=True):
        optimizer.zero_grad()
        errors(batch, target, **weights).mean().backward()
        optimizer.step()  # fault: stepped with the gradient of this rank's samples
        for weight in weights.values():
            dist.all_reduce(weight.grad, op=dist.ReduceOp.AVG)
    return finished(weights)


def replicated_averaging_weights(x, t, **params):
    """Local SGD: the weights are averaged once, after steps on gradients of the rank's own."""
    for batch, target in zip(x, t, strict=True):
        grads = mean_gradients(batch, target, params)
        params = {name: weight - RATE * grads[name] for name, weight in params.items()}
    for weight in params.values():
        dist.all_reduce(weight, op=dist.ReduceOp.AVG)  # fault: the second step began at other weights on each rank
    return params


def flat_zero2_misaligned(x, t, **params):
    optimizer, size = Adam(), dist.get_world_size()
    for batch, target in zip(x, t, strict=True):
        grads = packed(mean_gradients(batch, target, params).values(), size)
        own = own_rows(packed(reversed(params.values()), size))  # fault: weights and gradients are packed in another order
        own = optimizer.update("row", own, reduce_scatter_first(grads, None) / size)
        params = unpacked(gather_first(own, None), params)
    return params


def zero1_state_shared(x, t, **params):
    """The running square is kept for all parameters of one shape together."""
    optimizer = Adam()
    for batch, target in zip(x, t, strict=True):
        grads = averaged(mean_gradients(batch, target, params))
        for name, weight in params.items():
            rows = optimizer.update(tuple(weight.shape), own_rows(weight), own_rows(grads[name]))  # fault: one state for two
            params[name] = gather_first(rows, None)
    return params


# ---------------------------------------------------------------------- cases
def step_case(name, sequential, distributed, size, *, steps=1, shapes=ROWS, sharded=False, batch=8):
    features, out = shapes["w1"][0], shapes["w2"][1]
    split = {"dp": Shard(0)} if sharded else {}
    inputs = {"x": Input((steps, batch, features), {"dp": Shard(1)}), "t": Input((steps, batch, out), {"dp": Shard(1)})}
    inputs |= {key: Input(shape, split) for key, shape in shapes.items()}
    relation = dict.fromkeys(shapes, split)
    return Case(f"zero-{name}-{steps}-steps-dp{size}", sequential, distributed, {"dp": size}, inputs, relation)


UNEVEN = {"w1": (5, 7), "b1": (7,), "w2": (7, 3)}  # 63 elements: padding, and chunks that end inside of rows


def correct(size, steps):
    def case(name, sequential, distributed, **options):
        return step_case(name, sequential, distributed, size, steps=steps, **options)

    cases = []
    for name, make in BY_HAND.items():
        cases.append(case(f"replicated-{name}", trained(make), replicated(make)))
        cases.append(case(f"flat-{name}", trained(make), flat_zero2(make), shapes=UNEVEN))
        cases.append(case(f"3-{name}", trained(make), zero3(make), sharded=True))
    for name in ("adam", "adamw"):
        cases.append(case(f"1-{name}", trained(BY_HAND[name]), zero1(BY_HAND[name])))
        cases.append(case(f"2-{name}", trained(BY_HAND[name]), zero2(BY_HAND[name])))
    for name, make in OF_TORCH.items():
        cases.append(case(f"torch-replicated-{name}", trained_by(make), replicated_by(make)))
    for name, make in AS_TORCH.items():
        cases.append(case(f"torch-by-hand-{name}", trained_by(OF_TORCH[name]), zero2(make)))
    for name, make in IN_ONE_CALL.items():
        cases.append(case(f"torch-in-one-call-{name}", trained_by(OF_TORCH[name]), replicated_by(make)))
    for name in ("momentum", "adamw", "fused-adamw", "rprop"):
        cases.append(case(f"torch-2-{name}", trained_by(OF_TORCH[name]), zero2_by(OF_TORCH[name])))
    return cases


def faults():
    def base(make, **options):
        return step_case("", trained(make), replicated(make), 2, **options)

    adam, sharded, uneven = base(Adam), base(DecayedSgd, sharded=True), base(Adam, shapes=UNEVEN)
    square = base(Adam, shapes={"w1": (8, 8), "b1": (8,), "w2": (8, 8)})
    by_torch = step_case("", trained_by(OF_TORCH["adam"]), replicated_by(OF_TORCH["adam"]), 2)
    return [
        faulty(adam, "zero-fault-not-gathered", zero1_without_gather, "the other ranks' rows stay as they were"),
        faulty(adam, "zero-fault-neighbour", zero1_neighbours_gradient, "the next rank's rows of the gradient"),
        faulty(base(AdamW), "zero-fault-summed", zero2_summed, "a sum of means, not their mean"),
        faulty(base(Momentum), "zero-fault-not-reduced", zero2_local_gradient, "the rows of the gradient are not reduced"),
        faulty(sharded, "zero-fault-decay", zero3_decayed_by_ranks, "the decay is divided by the number of ranks"),
        faulty(
            by_torch, "zero-fault-stepped-early", replicated_by_adam_before_reduction,
            "stepped with the gradient of this rank's samples",
        ),
        faulty(
            base(Sgd, steps=2), "zero-fault-local-steps", replicated_averaging_weights,
            "the second step began at other weights on each rank",
        ),
        faulty(uneven, "zero-fault-packed", flat_zero2_misaligned, "weights and gradients are packed in another order"),
        faulty(square, "zero-fault-shared-state", zero1_state_shared, "one state for two"),
        faulty(
            by_torch, "zero-fault-uncorrected", zero2(AdamUncorrected), "means that begin at zero are not corrected"
        ),
    ]  # fmt: skip


CASES = [*[case for size, steps in ((2, 2), (4, 1)) for case in correct(size, steps)], *faults()]
