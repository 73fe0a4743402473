"""A verdict that rests on layouts that shapes suggest says so first, and with which other layout all is right."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import graphguard as gg

HEADS, DIM, HIDDEN = 4, 3, 12


class Block(nn.Module):
    """Queries, keys and values in one weight; gate and up in another."""

    def __init__(self, size=1):
        super().__init__()
        self.size = size
        self.c_attn = nn.Linear(HIDDEN, 3 * HIDDEN // size)
        self.proj = nn.Linear(HIDDEN // size, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 2 * 24 // size, bias=False)
        self.down = nn.Linear(24 // size, HIDDEN, bias=False)

    def summed(self, y):
        if self.size > 1:
            dist.all_reduce(y)
        return y

    def forward(self, x):
        q, k, v = (each.view(-1, HEADS // self.size, DIM) for each in self.c_attn(x).chunk(3, -1))
        scores = torch.einsum("ihd,jhd->hij", q, k)
        x = x + self.summed(self.proj(torch.einsum("hij,jhd->ihd", scores, v).reshape(-1, HIDDEN // self.size)))
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.summed(self.down(torch.relu(gate) * up))


def check(wrong=False, **options):
    def parallel(mesh):
        return nn.Sequential(*(Block(mesh.size()) for _ in range(2)))

    def step(model, x):
        return model(x) * (2 if wrong and dist.is_initialized() else 1)

    def sequential():
        return nn.Sequential(*(Block() for _ in range(2)))

    return gg.verify_model(sequential, parallel, mesh={"tp": 2}, inputs={"x": gg.Input((3, HIDDEN))}, step=step, **options)


STATED = {"*.c_attn.*": gg.Fused(3), "*.gate_up.weight": gg.Fused(2)}


@pytest.fixture(scope="module")
def report():
    return check()


def test_stated_as_it_is_it_verifies():
    assert check(params=STATED).verified


def test_the_layout_with_which_all_is_right_is_said(report):
    assert report.verdict == "refuted"
    assert report.guesses[-1] == (
        'it is verified with params={"*.c_attn.weight": gg.Fused(3), "*.c_attn.bias": gg.Fused(3), '
        '"*.gate_up.weight": gg.Fused(2)}'
    )


def test_what_is_said_is_what_to_write(report):
    _, _, code = report.guesses[-1].partition("params=")
    assert check(params=eval(code, {"gg": gg})).verified


def test_guesses_are_told_first(report):
    first, *rest = report.lines()
    assert first.startswith("guessed: Shard(0) on tp, as their shapes suggest: the parameters {0,1}.{c_attn,gate_up}.weight")
    assert not any(line.startswith("assumed: Shard(0)") for line in rest)
    assert set(report.guesses[:-1]) <= set(report.assumptions)


def test_where_no_layout_helps_none_is_said():
    report = check(wrong=True)
    assert report.verdict == "refuted" and all("as their shapes suggest" in text for text in report.guesses)
