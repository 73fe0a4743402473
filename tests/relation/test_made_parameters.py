"""Parameters that the ranks have under another name, or put together from several: `params={name: fn(all_params, coord)}`."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import graphguard as gg
from graphguard import Shard, UsageError

WIDTH = 4


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Apart(nn.Module):
    """Three projections; with `split`, a rank's rows of them."""

    def __init__(self, split=1):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH // split, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH // split, WIDTH, bias=False)
        self.split = split

    def forward(self, x):
        y = self.out(torch.sigmoid(self.q(x) * self.k(x)) * self.v(x))
        return Sum.apply(y) if self.split > 1 else y


class Together(nn.Module):
    """The same in one weight."""

    def __init__(self, split=1, order=(0, 1, 2), times=1.0):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH // split, bias=False)
        self.out = nn.Linear(WIDTH // split, WIDTH, bias=False)
        self.split, self.order, self.times = split, order, times

    def forward(self, x):
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (parts[place] for place in self.order)
        y = self.out(torch.sigmoid(q * k) * v) * self.times
        return Sum.apply(y) if self.split > 1 else y


def rows_of_all(params, coord):
    return torch.cat([params[f"{name}.weight"].chunk(2)[coord["tp"]] for name in "qkv"])


def verify(sequential, distributed, params, **options):
    step = gg.train_step(lambda model, x: model(x).square().sum())
    given = {"mesh": {"tp": 2}, "inputs": {"x": gg.Input((3, WIDTH))}} | options
    return gg.verify_model(
        sequential, lambda mesh: distributed(), step=step, params={"out.weight": Shard(1), **params}, **given
    )


def test_a_weight_that_is_put_together_is_proved_and_its_gradient_goes_through_the_same_map():
    report = verify(Apart, lambda: Together(2), {"qkv.weight": rows_of_all})
    assert report.verified
    assert report.relation["grads.qkv.weight"].text == "grads.qkv.weight is as the layout of rows_of_all says, on every rank"
    assert {"grads.q.weight", "grads.k.weight", "grads.v.weight"}.isdisjoint(report.relation)
    assert report.parameters["qkv.weight"] == "made by rows_of_all of q.weight, k.weight, v.weight, as params= states"


def test_parts_in_another_order_and_wrong_gradients_are_refuted():
    assert verify(Apart, lambda: Together(2, order=(0, 2, 1)), {"qkv.weight": rows_of_all}).verdict == "refuted"
    report = verify(Apart, lambda: Together(2, times=0.5), {"qkv.weight": rows_of_all})
    assert report.verdict == "refuted"


class Forgetful(Together):
    """The gradient of the fused weight is never made."""

    def __init__(self):
        super().__init__(2)
        self.qkv.weight.requires_grad_(False)


def test_a_rank_without_the_gradient_of_what_it_holds_is_refuted():
    report = verify(Apart, Forgetful, {"qkv.weight": rows_of_all})
    assert report.verdict == "refuted" and report.findings[0].kind == "missing-output"


def part(number):
    def rows(params, coord):
        return params["qkv.weight"].chunk(3)[number].chunk(2)[coord["tp"]]

    return rows


def test_a_weight_that_is_taken_apart_is_proved():
    parts = {f"{name}.weight": part(number) for number, name in enumerate("qkv")}
    assert verify(Together, lambda: Apart(2), parts).verified
    wrong = {**parts, "k.weight": part(2), "v.weight": part(1)}
    assert verify(Together, lambda: Apart(2), wrong).verdict == "refuted"


def test_fused_is_equal_parts_each_of_them_sharded():
    report = verify(Together, lambda: Together(2), {"qkv.weight": gg.Fused(3)})
    assert report.verified and report.parameters["qkv.weight"] == "Fused(3), as params= states"
    assert verify(Together, lambda: Together(2), {"qkv.weight": Shard(0)}).verdict == "refuted"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"qkv.weight": lambda params, coord: params["query"]},
            "reads 'query', which the sequential module does not have",
        ),
        ({"qkv.weight": lambda params, coord: torch.zeros(6, WIDTH)}, "reads no parameter of the sequential module"),
        ({"qkv.weight": lambda params, coord: params["q.weight"].size()}, "returned Size, not a tensor"),
        ({"qkv.weight": lambda params, coord: params["q.weight"].chunk(9)[8]}, "raised IndexError: tuple index out of range"),
        (
            {"qkv.weight": lambda params, coord: params["q.weight"][:1]},
            "no rank has q.weight[1, 0]",
        ),
        ({}, "params={name: fn(all_params, coord)} says what it is made of"),
    ],
)
def test_what_is_wrong_with_a_map_is_told(params, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        verify(Apart, lambda: Together(2), params)


def test_what_is_wrong_with_fused_is_told():
    with pytest.raises(UsageError, match=re.escape("Fused(3): name its axis of the mesh, one of ['dp', 'tp']")):
        mesh, out = {"dp": 1, "tp": 2}, {"tp": Shard(1)}
        verify(Together, lambda: Together(2), {"qkv.weight": gg.Fused(3), "out.weight": out}, mesh=mesh)
    with pytest.raises(UsageError, match=re.escape("dim 0 of the shape (12, 4) has no 5 equal parts")):
        verify(Together, lambda: Together(2), {"qkv.weight": gg.Fused(5)})
    with pytest.raises(UsageError, match="write the number of equal parts"):
        gg.Fused(0)
