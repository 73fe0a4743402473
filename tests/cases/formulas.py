"""A function of torch in the sequential program, its formula on the ranks: activations with backwards by hand, and losses."""

import functools
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.leaves import gradients, leaves
from cases.regions import copy_to
from graphguard import Input, Shard

TOKENS, WIDTH, HIDDEN = 4, 3, 8


# ---------------------------------------------------------------------- activations of a tensor-parallel MLP
class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        below = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        return grad * (below + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


class GeluByTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        scale = math.sqrt(2 / math.pi)
        t = torch.tanh(scale * x * (1 + 0.044715 * x * x))
        slope = 0.5 * x * (1 - t * t) * scale * (1 + 3 * 0.044715 * x * x) + 0.5 * (1 + t)
        return slope * grad


class GeluWithoutDensity(Gelu):
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 0.5 * (1 + torch.erf(x / math.sqrt(2)))  # fault: the slope of the erf is left out


class GeluByTanhOfAnotherCube(GeluByTanh):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.44715 * x * x)))  # fault: a digit is missing


def plain(x):
    """Left to autograd."""
    return 0.5 * x + 0.5 * x * torch.erf(x * 0.5**0.5)


def mlp(x, up, bias, down, dy, act):
    live = leaves({"x": x, "up": up, "bias": bias, "down": down})
    y = act(live["x"] @ live["up"] + live["bias"]) @ live["down"]
    return {"y": y.detach(), **gradients(y, live, dy)}


def mlp_tp(x, up, bias, down, dy, mesh, act):
    group = mesh.get_group("tp")
    live = leaves({"x": x, "up": up, "bias": bias, "down": down})
    part = act(copy_to(live["x"], group) @ live["up"] + live["bias"]) @ live["down"]
    grads = gradients(part, live, dy)
    y = part.detach()
    dist.all_reduce(y, group=group)
    return {"y": y, **grads}


def by_tanh(x):
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {
    "gelu": (F.gelu, Gelu.apply),
    "gelu-plain": (F.gelu, plain),
    "gelu-tanh": (by_tanh, GeluByTanh.apply),
}


def mlp_case(name, tp):
    library, formula = ACTIVATIONS[name]
    columns, rows = {"tp": Shard(1)}, {"tp": Shard(0)}
    split = {"x": {}, "up": columns, "bias": rows, "down": rows}
    shapes = {"x": (TOKENS, WIDTH), "up": (WIDTH, HIDDEN), "bias": (HIDDEN,), "down": (HIDDEN, WIDTH)}
    inputs = {key: Input(shape, split[key]) for key, shape in shapes.items()} | {"dy": Input((TOKENS, WIDTH))}
    return Case(
        f"formulas-{name}-tp{tp}", functools.partial(mlp, act=library), functools.partial(mlp_tp, act=formula), {"tp": tp},
        inputs, {"y": {}, **split},
    )  # fmt: skip


# ---------------------------------------------------------------------- losses of split samples
def divergence(x, y):
    return F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="sum")


def divergence_by_hand(x, y):
    return (y.softmax(-1) * (y.log_softmax(-1) - x.log_softmax(-1))).sum()


def divergence_reversed(x, y):
    return (x.softmax(-1) * (x.log_softmax(-1) - y.log_softmax(-1))).sum()  # fault: the two distributions are exchanged


def smooth(x, y):
    return F.smooth_l1_loss(x, y, reduction="sum", beta=0.5)


def smooth_by_hand(x, y):
    distance = (x - y).abs()
    return torch.where(distance < 0.5, (x - y) ** 2, distance - 0.25).sum()


def smooth_apart(x, y):
    distance = (x - y).abs()
    return torch.where(distance < 0.5, (x - y) ** 2, distance).sum()  # fault: the two curves do not meet


def huber(x, y):
    return F.huber_loss(x, y, reduction="sum", delta=2.0)


def huber_by_hand(x, y):
    distance = (x - y).abs()
    return torch.where(distance <= 2, 0.5 * (x - y) ** 2, 2 * distance - 2).sum()


def similarity(x, y):
    """Its gradient is not that of its value: torch holds norms below eps for constants."""
    return F.cosine_similarity(x, y, eps=1e-8).sum()


def similarity_by_hand(x, y):
    norms = [torch.linalg.vector_norm(t, dim=-1).clamp(min=1e-8) for t in (x, y)]
    return ((x * y).sum(-1) / (norms[0] * norms[1])).sum()


def with_gradient(x, y, loss):
    x = x.detach().requires_grad_()
    value = loss(x, y)
    grad = None if loss in LOSSES["similarity"] else torch.autograd.grad(value, x)[0]
    return value.detach(), grad


def with_gradient_dp(x, y, mesh, loss):
    value, grad = with_gradient(x, y, loss)
    dist.all_reduce(value, group=mesh.get_group("dp"))
    return value, grad


LOSSES = {
    "divergence": (divergence, divergence_by_hand),
    "smooth": (smooth, smooth_by_hand),
    "huber": (huber, huber_by_hand),
    "similarity": (similarity, similarity_by_hand),
}


def loss_case(name, dp, formula=None):
    library, by_hand = LOSSES[name]
    rows = Input((8, 4), {"dp": Shard(0)})
    return Case(
        f"formulas-{name}-dp{dp}", functools.partial(with_gradient, loss=library),
        functools.partial(with_gradient_dp, loss=formula or by_hand), {"dp": dp}, {"x": rows, "y": rows},
        {"0": {}} | ({} if name == "similarity" else {"1": {"dp": Shard(0)}}),
    )  # fmt: skip


def fault(case, name, act, text):
    return faulty(case, name, functools.partial(mlp_tp, act=act), text)


def loss_fault(name, loss, text):
    return faulty(loss_case(name, 2), f"formulas-fault-{name}", functools.partial(with_gradient_dp, loss=loss), text)


CASES = [
    *[mlp_case(name, tp) for tp in (2, 4, 8) for name in ACTIVATIONS],
    *[loss_case(name, dp) for dp in (2, 4) for name in LOSSES],
    fault(mlp_case("gelu", 2), "formulas-fault-density", GeluWithoutDensity.apply, "the slope of the erf is left out"),
    fault(mlp_case("gelu-tanh", 2), "formulas-fault-cube", GeluByTanhOfAnotherCube.apply, "a digit is missing"),
    loss_fault("divergence", divergence_reversed, "the two distributions are exchanged"),
    loss_fault("smooth", smooth_apart, "the two curves do not meet"),
]
