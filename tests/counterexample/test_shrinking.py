"""Counterexamples: as few and as small numbers as still show the difference, inside of what the inputs may be."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from harness import fails, judged

import graphguard as gg
from graphguard import Shard

SPLIT = {"x": gg.Input((4, 6), Shard(1)), "w": gg.Input((6, 3), Shard(0))}
BIASED = {**SPLIT, "b": gg.Input((3,))}


def biased(x, w, b):
    return x @ w + b


def biased_early(x, w, b):
    y = x @ w + b
    dist.all_reduce(y)
    return y


def test_a_counterexample_has_no_more_numbers_than_it_needs(tmp_path):
    found = gg.verify(biased, biased_early, mesh={"tp": 2}, inputs=BIASED).counterexample
    assert found.lines()[:3] == [
        "counterexample: on rank 0, out[0, 0] is 2, where the sequential program has 1",
        "  inputs       b[0] = 1, 0 elsewhere",
        "  shapes       x [4, 6], w [6, 3], b [3]",
    ]
    assert found.to_plain()["inputs"] == ["b[0] = 1", "0 elsewhere"]
    assert "x2 = torch.full((3,), 0, dtype=torch.float64)  # b\nx2[0] = 1\n" in found.script
    assert "Generator" not in found.script and fails(found.script) == "1.0 is not 2.0"
    assert gg.verify(biased, biased_early, mesh={"tp": 2}, inputs=BIASED).counterexample == found


def test_only_so_many_inputs_are_told():
    found = gg.verify(biased, biased_early, mesh={"tp": 2}, inputs=BIASED).counterexample
    many = dataclasses.replace(
        found, shapes={f"x{n}": (n,) for n in range(14)}, inputs=(*(f"x{n} = 1" for n in range(20)), "0 elsewhere")
    )
    assert many.lines()[1].endswith("x9 = 1, x10 = 1, and 9 more, 0 elsewhere")
    assert many.lines()[2].endswith("x9 [9], x10 [10], and 3 more")


def test_the_window_is_where_the_difference_is():
    def wrong_on_the_last(x, w):
        y = x @ w
        dist.all_reduce(y.mul_(1 + dist.get_rank()))
        return y

    found = judged(lambda x, w: x @ w, wrong_on_the_last, SPLIT).counterexample
    assert found.lines()[:2] == [
        "counterexample: on rank 0, out[0, 0] is 2, where the sequential program has 1",
        "  inputs       x[0, 3] = 1, w[3, 0] = 1, 0 elsewhere",
    ]


def test_the_place_in_the_sequential_output_is_told_where_it_is_another():
    def half(x):
        return x.chunk(2)[dist.get_rank()] * (1 + dist.get_rank())

    found = judged(lambda x: x, half, {"x": gg.Input((4, 6))}, outputs={"out": Shard(0)}).counterexample
    assert found.lines()[0] == "counterexample: on rank 1, out[0, 0] is 2, where the sequential program has 1 at [2, 0]"


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ({"low": 0.5, "high": 2}, "x = 0.5 everywhere"),
        ({"low": 2}, "x = 2 everywhere"),
        ({"high": 0}, "x = -1 everywhere"),
        ({"low": -3, "high": 7}, "x[0, 0] = 1, 0 elsewhere"),
    ],
)
def test_small_inputs_are_inside_of_their_bounds(bounds, text):
    found = judged(lambda x: x, lambda x: 2 * x, {"x": gg.Input((4, 6), **bounds)}).counterexample
    assert ", ".join(found.inputs) == text and fails(found.script)


def test_a_window_lies_in_what_the_bounds_allow():
    inputs = {"x": gg.Input((4, 6), low=0.5, high=2)}
    found = judged(lambda x: x, lambda x: torch.where(x == 0.5, x, 2 * x), inputs).counterexample
    assert found.inputs == ("x[0, 0] = 1", "x = 0.5 elsewhere") and fails(found.script)


def test_what_differs_only_among_equal_numbers_is_not_shown():
    def first_of_the_largest(x, b):
        return torch.nn.functional.one_hot(x.argmax(-1), 6).float() + b

    def last_of_the_largest(x, b):
        return torch.nn.functional.one_hot(5 - x.flip(-1).argmax(-1), 6).float() + b * 2

    inputs = {"x": gg.Input((4, 6)), "b": gg.Input((6,))}
    found = judged(first_of_the_largest, last_of_the_largest, inputs).counterexample
    assert fails(found.script) and found.inputs == ()  # all zeros would blame the order of equals


def test_integers_and_flags_are_made_small_too():
    inputs = {
        "x": gg.Input((4, 6)),
        "ids": gg.Input((5,), dtype=torch.int64, low=0, high=4),
        "keep": gg.Input((4, 6), dtype=torch.bool),
    }

    def rows(x, ids, keep):
        return x.masked_fill(keep, 0)[ids]

    found = judged(rows, lambda x, ids, keep: x.masked_fill(keep, 0)[ids] + 1, inputs).counterexample
    assert found.inputs == ("0 everywhere",) and fails(found.script)
