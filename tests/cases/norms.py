"""RMSNorm and LayerNorm: replicated before a split product, on a part of the sequence, and with the hidden dim split."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from cases.case import Case, faulty
from cases.regions import copy_to
from graphguard import Shard

EPS = 1e-5


def rms_by_torch(x, weight):
    return F.rms_norm(x, (x.size(-1),), weight, EPS)


def rms_by_hand(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def layer_by_torch(x, weight, bias):
    return F.layer_norm(x, (x.size(-1),), weight, bias, EPS)


def layer_by_hand(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight + bias


def layer_by_moments(x, weight, bias):
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + EPS) * weight + bias


def differentiated(y, dy, **inputs):
    grads = torch.autograd.grad(y, list(inputs.values()), dy)
    return {"y": y.detach(), "grads": dict(zip(inputs, grads, strict=True))}


def leaves(*tensors):
    return [tensor.requires_grad_() for tensor in tensors]


class SumOfParts(torch.autograd.Function):
    """A sum over the ranks of which each uses the total for its own part: the gradients are summed as well."""

    @staticmethod
    def forward(ctx, part):
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


# ---------------------------------------------------------------------- one device, and a part of the sequence
def alone(norm):
    def step(x, dy, **weights):
        leaves(x, *weights.values())
        return differentiated(norm(x, *weights.values()), dy, x=x, **weights)

    return step


def on_sequence(norm):
    """Every rank has some rows; what belongs to all rows is summed."""

    def step(x, dy, **weights):
        out = alone(norm)(x, dy, **weights)
        for name in weights:
            dist.all_reduce(out["grads"][name])
        return out

    return step


def on_sequence_averaged(x, dy, weight, bias):
    out = alone(layer_by_torch)(x, dy, weight=weight, bias=bias)
    dist.all_reduce(out["grads"]["bias"])
    dist.all_reduce(out["grads"]["weight"], op=dist.ReduceOp.AVG)  # fault: parts of a sum are averaged
    return out


def on_sequence_with_other_epsilon(x, dy, weight):
    leaves(x, weight)
    norm = x.square().mean(-1, keepdim=True).sqrt() + EPS  # fault: epsilon is added after the square root
    out = differentiated(x / norm * weight, dy, x=x, weight=weight)
    dist.all_reduce(out["grads"]["weight"])
    return out


# ---------------------------------------------------------------------- replicated, before a column-parallel product
def before_product(norm):
    def step(x, a, dy, **weights):
        leaves(x, a, *weights.values())
        return differentiated(norm(x, *weights.values()) @ a, dy, x=x, a=a, **weights)

    return step


def before_split_product(norm):
    def step(x, a, dy, **weights):
        leaves(x, a, *weights.values())
        return differentiated(copy_to(norm(x, *weights.values()), None) @ a, dy, x=x, a=a, **weights)

    return step


def inside_split_product(norm):
    """The region begins before the norm, so that the gradients of its weights are parts to be summed."""

    def step(x, a, dy, **weights):
        leaves(x, a, *weights.values())
        out = differentiated(norm(copy_to(x, None), *weights.values()) @ a, dy, x=x, a=a, **weights)
        for name in weights:
            dist.all_reduce(out["grads"][name])
        return out

    return step


def before_split_product_without_region(x, a, dy, weight):
    leaves(x, a, weight)
    h = F.rms_norm(x, (x.size(-1),), weight, EPS)  # fault: the gradient that arrives here is only this rank's
    return differentiated(h @ a, dy, x=x, a=a, weight=weight)


def before_split_product_summed_twice(x, a, dy, weight):
    leaves(x, a, weight)
    out = differentiated(copy_to(rms_by_hand(x, weight), None) @ a, dy, x=x, a=a, weight=weight)
    dist.all_reduce(out["grads"]["weight"])  # fault: the whole gradient is summed again
    return out


# ---------------------------------------------------------------------- the hidden dim is split
def rms_of_parts(x, weight, hidden):
    mean_square = SumOfParts.apply(x.square().sum(-1, keepdim=True)) / hidden
    return x * torch.rsqrt(mean_square + EPS) * weight


def layer_of_parts(x, weight, bias, hidden):
    mean = SumOfParts.apply(x.sum(-1, keepdim=True)) / hidden
    variance = SumOfParts.apply((x - mean).square().sum(-1, keepdim=True)) / hidden
    return (x - mean) * torch.rsqrt(variance + EPS) * weight + bias


def layer_of_two_moments(x, weight, bias, hidden):
    """Both sums in one collective; the variance is the mean of squares less the square of the mean."""
    moments = SumOfParts.apply(torch.stack([x.sum(-1), x.square().sum(-1)])) / hidden
    mean, square = moments.unsqueeze(-1).unbind(0)
    return (x - mean) * torch.rsqrt(square - mean * mean + EPS) * weight + bias


def on_hidden(norm, hidden):
    def step(x, dy, **weights):
        leaves(x, *weights.values())
        return differentiated(norm(x, *weights.values(), hidden), dy, x=x, **weights)

    return step


def rms_of_parts_by_formula(x, dy, weight):
    """The backward is written out: one sum for the norm, one for its gradient."""
    hidden = x.size(-1) * dist.get_world_size()
    square = x.square().sum(-1, keepdim=True)
    dist.all_reduce(square)
    scale = torch.rsqrt(square / hidden + EPS)
    along = (dy * weight * x).sum(-1, keepdim=True)
    dist.all_reduce(along)
    dx = scale * (dy * weight - x * scale.square() * along / hidden)
    return {"y": x * scale * weight, "grads": {"x": dx, "weight": (dy * x * scale).sum((0, 1))}}


def rms_of_local_mean(x, dy, weight):
    leaves(x, weight)
    mean_square = x.square().mean(-1, keepdim=True)
    y = x * torch.rsqrt(mean_square + EPS) * weight  # fault: the mean is over this rank's part only
    return differentiated(y, dy, x=x, weight=weight)


def rms_of_local_count(x, dy, weight):
    leaves(x, weight)
    mean_square = SumOfParts.apply(x.square().sum(-1, keepdim=True)) / x.size(-1)  # fault: divided by the local size
    return differentiated(x * torch.rsqrt(mean_square + EPS) * weight, dy, x=x, weight=weight)


class SumWithIdentityBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad.clone()  # fault: the gradient of a total that all ranks use is not summed


def rms_with_local_gradient(x, dy, weight):
    leaves(x, weight)
    total = SumWithIdentityBackward.apply(x.square().sum(-1, keepdim=True))
    y = x * torch.rsqrt(total / (x.size(-1) * dist.get_world_size()) + EPS) * weight
    return differentiated(y, dy, x=x, weight=weight)


def layer_of_mean_variances(x, dy, weight, bias):
    leaves(x, weight, bias)
    size = dist.get_world_size()
    mean = SumOfParts.apply(x.mean(-1, keepdim=True)) / size
    variance = SumOfParts.apply(x.var(-1, correction=0, keepdim=True)) / size  # fault: variances around local means
    return differentiated((x - mean) * torch.rsqrt(variance + EPS) * weight + bias, dy, x=x, weight=weight, bias=bias)


# ---------------------------------------------------------------------- cases
RMS = {"torch": rms_by_torch, "hand": rms_by_hand}
LAYER = {"torch": layer_by_torch, "hand": layer_by_hand, "moments": layer_by_moments}
NORMS = {f"rms-{kind}": norm for kind, norm in RMS.items()} | {f"layer-{kind}": norm for kind, norm in LAYER.items()}


def weights_of(name, hidden, placement):
    names = ("weight",) if name.startswith("rms") else ("weight", "bias")
    return {key: gg.Input((hidden,), placement) for key in names}


def sequence_case(name, norm, size, length=8, sequential=None):
    placement = {"tp": Shard(1)}
    weights = weights_of(name, 6, {})
    inputs = {"x": gg.Input((3, length, 6), placement), "dy": gg.Input((3, length, 6), placement)} | weights
    relation = {"y": placement, "grads.x": placement} | {f"grads.{key}": {} for key in weights}
    programs = alone(sequential or norm), on_sequence(norm)
    return Case(f"norms-{name}-sequence-{size}", *programs, {"tp": size}, inputs, relation)


def product_case(name, norm, size, around=before_split_product, kind="replicated", out=8):
    column = {"tp": Shard(1)}
    weights = weights_of(name, 6, {})
    inputs = {"x": gg.Input((5, 6)), "a": gg.Input((6, out), column), "dy": gg.Input((5, out), column)} | weights
    relation = {"y": column, "grads.x": {}, "grads.a": column} | {f"grads.{key}": {} for key in weights}
    return Case(f"norms-{name}-{kind}-{size}", before_product(norm), around(norm), {"tp": size}, inputs, relation)


def hidden_case(name, sequential, distributed, size, hidden=16):
    placement = {"tp": Shard(2)}
    weights = weights_of(name, hidden, {"tp": Shard(0)})
    inputs = {"x": gg.Input((2, 5, hidden), placement), "dy": gg.Input((2, 5, hidden), placement)} | weights
    relation = {"y": placement, "grads.x": placement} | {f"grads.{key}": {"tp": Shard(0)} for key in weights}
    return Case(f"norms-{name}-hidden-{size}", alone(sequential), distributed, {"tp": size}, inputs, relation)


def hidden_cases(size, hidden, suffix=""):
    return [
        hidden_case(f"rms-torch{suffix}", rms_by_torch, on_hidden(rms_of_parts, hidden), size, hidden),
        hidden_case(f"rms-hand{suffix}", rms_by_hand, on_hidden(rms_of_parts, hidden), size, hidden),
        hidden_case(f"layer-torch{suffix}", layer_by_torch, on_hidden(layer_of_parts, hidden), size, hidden),
        hidden_case(f"layer-hand{suffix}", layer_by_hand, on_hidden(layer_of_parts, hidden), size, hidden),
        hidden_case(f"layer-two-moments{suffix}", layer_by_torch, on_hidden(layer_of_two_moments, hidden), size, hidden),
    ]


def correct(size):
    return [
        *[sequence_case(name, norm, size) for name, norm in NORMS.items()],
        *[product_case(name, norm, size) for name, norm in NORMS.items()],
        product_case("rms-torch", rms_by_torch, size, inside_split_product, "inside"),
        product_case("layer-hand", layer_by_hand, size, inside_split_product, "inside"),
        *hidden_cases(size, 16),
        hidden_case("rms-formula", rms_by_hand, rms_of_parts_by_formula, size),
    ]


def mixed_and_uneven():
    """One norm on each side, and sizes that do not divide."""
    return [
        sequence_case("rms-torch-for-hand", rms_by_hand, 4, sequential=rms_by_torch),
        sequence_case("rms-hand-for-torch", rms_by_torch, 2, sequential=rms_by_hand),
        sequence_case("layer-torch-for-hand", layer_by_hand, 2, sequential=layer_by_torch),
        sequence_case("layer-moments-for-torch", layer_by_torch, 4, sequential=layer_by_moments),
        sequence_case("rms-torch-uneven", rms_by_torch, 4, length=7),
        sequence_case("layer-torch-uneven", layer_by_torch, 4, length=7),
        sequence_case("layer-hand-idle-rank", layer_by_hand, 4, length=6),
        product_case("layer-torch-uneven", layer_by_torch, 4, out=10),
        *hidden_cases(8, 8, "-one-each"),
        *hidden_cases(4, 10, "-uneven"),
    ]


def faults():
    on_layer, on_rms = sequence_case("layer", layer_by_torch, 2), sequence_case("rms", rms_by_torch, 2)
    product = product_case("rms", rms_by_torch, 4)
    product_by_hand = product_case("rms", rms_by_hand, 2)
    rms = hidden_case("rms", rms_by_torch, rms_of_parts_by_formula, 4)
    rms_by_parts = hidden_case("rms", rms_by_hand, rms_of_parts_by_formula, 2)
    layer = hidden_case("layer", layer_by_torch, on_hidden(layer_of_parts, 16), 4)
    everything = {"stated": ("*",)}
    local_gradient = "the gradient of a total that all ranks use is not summed"
    return [
        faulty(on_layer, "norms-fault-averaged", on_sequence_averaged, "parts of a sum are averaged", **everything),
        faulty(on_rms, "norms-fault-epsilon", on_sequence_with_other_epsilon, "epsilon is added after the square root"),
        faulty(
            product,
            "norms-fault-no-region",
            before_split_product_without_region,
            "the gradient that arrives here is only this rank's",
            **everything,
        ),
        faulty(
            product_by_hand,
            "norms-fault-summed-twice",
            before_split_product_summed_twice,
            "the whole gradient is summed again",
            **everything,
        ),
        faulty(rms, "norms-fault-local-mean", rms_of_local_mean, "the mean is over this rank's part only"),
        faulty(rms_by_parts, "norms-fault-local-count", rms_of_local_count, "divided by the local size"),
        faulty(rms, "norms-fault-local-gradient", rms_with_local_gradient, local_gradient),
        faulty(layer, "norms-fault-mean-variances", layer_of_mean_variances, "variances around local means"),
    ]


CASES = [*[case for size in (2, 4, 8) for case in correct(size)], *mixed_and_uneven(), *faults()]
