"""Low-rank adapters (LoRA) beside layers that are split: which of the two narrow matrices is split, and what must be summed.

Beside a layer split by columns, `a` is whole and `b` is split: every rank has the narrow product, but sees only its part of
its gradient, so the gradient of `a` is summed. Beside a layer split by rows it is the other way around: `a` is split, the
narrow product is a sum over the ranks, and the layer's own sum can take the adapter along.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, OUT, NARROW, ALPHA = 3, 8, 6, 2, 0.5


class Copy(torch.autograd.Function):
    """The same on all ranks; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def adapted(x, w, a, b):
    return F.linear(x, w) + ALPHA * F.linear(F.linear(x, a), b)


def by_columns(x, w, a, b):
    return F.linear(Copy.apply(x), w) + ALPHA * F.linear(Copy.apply(F.linear(x, a)), b)


def gradient_of_a_in_parts(x, w, a, b):
    x = Copy.apply(x)
    # fault: gradient_of_the_narrow_matrix_is_not_summed
    return F.linear(x, w) + ALPHA * F.linear(F.linear(x, a), b)


def gradient_of_x_in_parts(x, w, a, b):
    # fault: gradient_of_the_input_is_not_summed
    return F.linear(x, w) + ALPHA * F.linear(Copy.apply(F.linear(x, a)), b)


def by_rows(x, w, a, b):
    return Sum.apply(F.linear(x, w)) + ALPHA * F.linear(Sum.apply(F.linear(x, a)), b)


def summed_twice(x, w, a, b):
    # fault: narrow_product_is_summed_twice
    return Sum.apply(F.linear(x, w) + ALPHA * F.linear(Sum.apply(F.linear(x, a)), b))


def never_summed(x, w, a, b):
    # fault: narrow_product_is_not_summed
    return Sum.apply(F.linear(x, w)) + ALPHA * F.linear(F.linear(x, a), b)


def tuned(layer):
    """The layer is frozen; the adapter and the input have gradients."""

    def program(x, w, a, b, dy):
        for each in (x, a, b):
            each.requires_grad_()
        y = layer(x, w, a, b)
        y.backward(dy)
        return {"y": y.detach(), "x": x.grad, "a": a.grad, "b": b.grad}

    return program


def check(layer, placements):
    shapes = {"x": (TOKENS, HIDDEN), "w": (OUT, HIDDEN), "a": (NARROW, HIDDEN), "b": (OUT, NARROW), "dy": (TOKENS, OUT)}
    inputs = {name: gg.Input(shape, placements.get(name, Replicate())) for name, shape in shapes.items()}
    outputs = {name: placements.get(name, Replicate()) for name in ("x", "a", "b")}
    outputs["y"] = placements.get("dy", Replicate())
    return gg.verify(tuned(adapted), tuned(layer), mesh={"tp": 2}, inputs=inputs, outputs=outputs)


COLUMNS = {"w": Shard(0), "b": Shard(0), "dy": Shard(1)}
ROWS = {"x": Shard(1), "w": Shard(1), "a": Shard(1)}


@gg.check
def beside_columns():
    return check(by_columns, COLUMNS)


@gg.check
def beside_rows():
    return check(by_rows, ROWS)


@gg.check(expect="refuted")
def gradient_of_the_narrow_matrix_is_not_summed():
    return check(gradient_of_a_in_parts, COLUMNS)


@gg.check(expect="refuted")
def gradient_of_the_input_is_not_summed():
    return check(gradient_of_x_in_parts, COLUMNS)


@gg.check(expect="refuted")
def narrow_product_is_not_summed():
    return check(never_summed, ROWS)


@gg.check(expect="refuted")
def narrow_product_is_summed_twice():
    return check(summed_twice, ROWS)
