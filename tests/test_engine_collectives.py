"""Reshapes and collectives of described tensors, against numpy, lane by lane."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_values import ARRAYS, Pair, lane_shard, only

from graphguard.engine.collective import MOST_MEMBERS, all_gather, all_reduce, average, groups_of, reduce_scatter
from graphguard.engine.evaluate import Evaluator
from graphguard.engine.function import apply
from graphguard.engine.monomial import Undescribed
from graphguard.engine.shape import expand, reshape
from graphguard.engine.table import Table
from graphguard.engine.value import Value, concat, cut, multiply, whole

LANES = 4
GROUPS = {
    "all": np.arange(4)[None],
    "pairs": np.array([[0, 1], [2, 3]]),
    "strided": np.array([[0, 2], [1, 3]]),
    "reversed": np.array([[3, 2, 1, 0]]),
    "alone": np.arange(4)[:, None],
}


def start(table, draw):
    x = whole(table.input("x", (6, 6)))
    value, arrays = x, [ARRAYS["x"]] * LANES
    if draw(st.booleans()):
        y = whole(table.input("y", (6, 6)))
        k = np.array([draw(st.integers(0, 5)) for _ in range(LANES)]) if draw(st.booleans()) else np.array([0, 1, 2, 3])
        value = multiply(table, [cut(x, 1, k, k + 1), cut(y, 0, k, k + 1)], ["ik", "kj"], "ij")
        arrays = [ARRAYS["x"][:, i : i + 1] @ ARRAYS["y"][i : i + 1] for i in k]
    dim, width = draw(st.integers(0, 1)), draw(st.sampled_from([1, 2, 4]))
    starts = np.array([draw(st.integers(0, 6 - width)) for _ in range(LANES)])
    if draw(st.booleans()):
        starts = np.arange(LANES) % (6 // width) * width
    value = cut(value, dim, starts, starts + width)
    return Pair(value, [np.take(a, range(s, s + width), dim) for a, s in zip(arrays, starts, strict=True)])


def per_group(arrays, members, combine):
    result = [None] * LANES
    for row in members:
        for place, lane in enumerate(row):
            result[lane] = combine([arrays[member] for member in row], place)
    return result


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(list(GROUPS)))
def test_collectives_mean_what_they_say_in_every_lane(data, name):
    table, groups = Table(), groups_of(GROUPS[name])
    pair = start(table, data.draw)
    dim = data.draw(st.integers(0, 1))
    reduced = all_reduce(table, pair.value, groups)
    Pair(reduced, per_group(pair.arrays, GROUPS[name], lambda held, place: sum(held))).check(table)
    gathered = all_gather(table, pair.value, dim, groups)
    Pair(gathered, per_group(pair.arrays, GROUPS[name], lambda held, place: np.concatenate(held, dim))).check(table)
    means = average(table, pair.value, groups)
    Pair(means, per_group(pair.arrays, GROUPS[name], lambda held, place: sum(held) / len(held))).check(table)
    if pair.arrays[0].shape[dim] % groups.size == 0:
        scattered = reduce_scatter(table, pair.value, dim, groups)
        parts = per_group(pair.arrays, GROUPS[name], lambda held, place: np.split(sum(held), len(held), dim)[place])
        Pair(scattered, parts).check(table)


@pytest.mark.parametrize("lanes", [2, 8, 1024])
@pytest.mark.parametrize("size", [1, 3])
def test_any_number_of_lanes_is_one_step(lanes, size):
    table, groups = Table(), groups_of(np.arange(lanes)[None])
    x, w = whole(table.input("x", (4, lanes * size))), whole(table.input("w", (lanes * size, 4)))
    sequential = multiply(table, [x, w], ["ik", "kj"], "ij", file=True)
    partial = multiply(table, [lane_shard(x, 1, lanes), lane_shard(w, 0, lanes)], ["ik", "kj"], "ij")
    assert [f.atom for f in only(all_reduce(table, partial, groups)).monomial.factors] == [
        f.atom for f in only(sequential).monomial.factors
    ]
    gathered = only(all_gather(table, lane_shard(x, 1, lanes), 1, groups))
    assert gathered.box == ((0, 4), (0, lanes * size)) and {*gathered.monomial.ranges.values()} == {(0, 4), (0, lanes * size)}


def test_a_part_that_two_ranks_hold_is_counted_twice():
    table = Table()
    x, w = whole(table.input("x", (6, 6))), whole(table.input("y", (6, 6)))
    filed = multiply(table, [x, w], ["ik", "kj"], "ij", file=True)
    starts = np.array([0, 3, 0, 3])
    partial = multiply(table, [cut(x, 1, starts, starts + 3), cut(w, 0, starts, starts + 3)], ["ik", "kj"], "ij")
    total = all_reduce(table, partial, groups_of(GROUPS["all"]))
    assert (
        only(total).monomial.coefficient == 2 and only(total).monomial.factors[0].atom == only(filed).monomial.factors[0].atom
    )
    once = all_reduce(table, partial, groups_of(GROUPS["pairs"]))
    assert only(once).monomial.coefficient == 1


def test_shards_gathered_in_another_order_are_another_tensor():
    table = Table()
    shard = lane_shard(whole(table.input("x", (4, 6))), 0, 4)
    assert len(all_gather(table, shard, 0, groups_of(GROUPS["reversed"])).terms) == 4


def test_what_too_many_ranks_hold_without_a_pattern_is_refused():
    lanes = MOST_MEMBERS + 1
    table, groups = Table(), groups_of(np.arange(lanes)[None])
    x = whole(table.input("x", (2 * lanes, 2)))
    with pytest.raises(Undescribed, match="follows no pattern"):
        all_reduce(table, lane_shard(x, 0, lanes), groups)


# ---------------------------------------------------------------------- shapes
SHAPES = [(24,), (4, 6), (6, 4), (2, 2, 6), (4, 3, 2), (2, 12), (1, 24), (4, 1, 6), (2, 2, 3, 2), (24, 1)]


ACROSS = [((4, 6), (6, 4)), ((6, 4), (2, 2, 6)), ((6, 4), (4, 3, 2)), ((6, 4), (4, 1, 6)), ((6, 4), (2, 2, 3, 2))]


@pytest.mark.parametrize(("old", "new"), list(itertools.permutations(SHAPES, 2)), ids=str)
def test_reshape_means_what_numpy_does(old, new):
    table = Table()
    array = {"x": np.random.default_rng(1).normal(size=old)}
    if (old, new) in ACROSS or (new, old) in ACROSS:
        with pytest.raises(Undescribed, match=r"cuts across joined dims|does not split"):
            reshape(table, whole(table.input("x", old)), new)
        return
    value = reshape(table, whole(table.input("x", old)), new)
    np.testing.assert_allclose(Evaluator(table, array).value(value), array["x"].reshape(new))
    back = reshape(table, apply(table, "tanh", [value]), old)
    np.testing.assert_allclose(Evaluator(table, array).value(back), np.tanh(array["x"]))


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_heads_of_a_shard_are_heads_of_the_whole(heads):
    """A rank's columns seen as heads are its part of all heads, with one head per rank too."""
    table, lanes = Table(), 4
    array = {"x": np.random.default_rng(1).normal(size=(5, lanes * heads * 3))}
    x = whole(table.input("x", array["x"].shape))
    local = reshape(table, lane_shard(x, 1, lanes), (5, heads, 3))
    for lane in range(lanes):
        want = array["x"].reshape(5, lanes * heads, 3)[:, lane * heads : (lane + 1) * heads]
        np.testing.assert_allclose(Evaluator(table, array).value(local, lane), want)


def test_a_reshape_of_pieces_keeps_those_that_it_does_not_touch():
    table = Table()
    x, y = whole(table.input("x", (6, 6))), whole(table.input("y", (6, 6)))
    both = concat(table, [cut(x, 0, 0, 2), cut(y, 0, 2, 6)], 0)
    Pair(reshape(table, both, (6, 2, 3)), [np.concatenate([ARRAYS["x"][:2], ARRAYS["y"][2:]]).reshape(6, 2, 3)]).check(table)
    with pytest.raises(Undescribed, match="covers a part of the dim"):
        reshape(table, both, (36,))


def test_expand_repeats_dims_of_size_one():
    table = Table()
    row = cut(whole(table.input("x", (6, 6))), 0, 2, 3)
    wide = expand(table, row, (4, 6))
    Pair(wide, [np.broadcast_to(ARRAYS["x"][2:3], (4, 6))]).check(table)
    Pair(multiply(table, [wide], ["ij"], "j"), [4 * ARRAYS["x"][2]]).check(table)
    with pytest.raises(Undescribed, match="only dims of size 1"):
        expand(table, wide, (8, 6))
    assert expand(table, Value((1, 6), ()), (4, 6)) == Value((4, 6), ())
