"""Masks by large numbers: what the case by case form proves, and what it must not; comparisons with minus infinity."""

import torch
import torch.distributed as dist
from cases.context import SCALE, Online, around, causal_mask, rotated

import graphguard as gg
from graphguard import Input, Replicate, Shard
from graphguard.engine.limits import Limits

INPUTS = {name: Input((1, 4, 2), Shard(1)) for name in "qkv"}


def scores_of(q, k, rows, columns, number):
    return (q @ k.transpose(-1, -2) * SCALE).masked_fill(~causal_mask(rows, columns), number)


def whole(number):
    def attention(q, k, v):
        positions = torch.arange(q.size(1))
        return scores_of(q, k, positions, positions, number).softmax(-1) @ v

    return attention


def by_blocks(number, skips=False, shift=0):
    def attention(q, k, v):
        state, rank, own = Online(), dist.get_rank(), torch.arange(q.size(1))
        for source, key, value in around(rotated)(k, v):
            if not skips or source <= rank:
                state.add(scores_of(q, key, rank * 2 + own + shift, source * 2 + own, number), value)
        return state.result()

    return attention


def verdict(sequential, distributed, inputs=INPUTS, **options):
    return gg.verify(sequential, distributed, mesh={"cp": 2}, inputs=inputs, **options).verdict


def test_blocks_that_are_masked_count_for_what_they_are():
    assert verdict(whole(-1e30), by_blocks(-1e30)) == "verified"
    assert verdict(whole(-5.0), by_blocks(-5.0)) != "verified"  # which is no mask, and is not tried
    assert verdict(whole(-5000.0), by_blocks(-6000.0)) != "verified"
    assert verdict(whole(-1e30), by_blocks(-1e30, shift=1)) == "refuted"


def test_a_block_that_is_skipped_is_not_one_that_is_masked_by_a_number():
    """Over the real numbers they differ by very little: that they are equal is not claimed."""
    assert verdict(whole(-1e30), by_blocks(-1e30, skips=True)) == "unproven"
    assert verdict(whole(float("-inf")), by_blocks(float("-inf"), skips=True)) == "verified"


def test_a_row_of_which_nothing_is_left_is_the_mean_of_all():
    def hidden(q, k, v):
        return scores_of(q, k, torch.arange(q.size(1)) - 1, torch.arange(k.size(1)), -1e30).softmax(-1) @ v

    assert verdict(hidden, by_blocks(-1e30, shift=-1)) == "verified"
    assert verdict(hidden, by_blocks(-1e30)) == "refuted"


def test_the_limit_is_told_and_can_be_set():
    assert Limits().for_masks().step_cases == 1 and Limits().step_cases == 0
    assert verdict(whole(-1e30), by_blocks(-1e30), limits={"step_cases": 1}) == "verified"


def test_what_is_compared_with_minus_infinity():
    inputs = {"x": Input((4,)), "y": Input((4,))}
    infinity = float("-inf")

    def chosen(x, y):
        return {"larger": x, "same": x, "below": y, "equal": torch.zeros_like(y)}

    def by_comparing(x, y):
        nothing = torch.full_like(x, infinity)
        return {
            "larger": torch.maximum(x, nothing),
            "same": torch.where(x == x, x, y),
            "below": torch.where(x < nothing, x, y),
            "equal": torch.where(nothing == nothing, torch.zeros_like(y), y),
        }

    def wrong(x, y):
        return {**by_comparing(x, y), "below": torch.where(torch.full_like(x, infinity) < x, x, y)}

    outputs = dict.fromkeys(("larger", "same", "below", "equal"), Replicate())
    assert verdict(chosen, by_comparing, inputs, outputs=outputs) == "verified"
    assert verdict(chosen, wrong, inputs, outputs=outputs) != "verified"
