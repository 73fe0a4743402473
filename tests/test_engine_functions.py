"""Elementwise functions: against numpy in every lane, and equal where they must be."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_values import ARRAYS, LANES, STEPS, Pair, lane_shard, only, walk

from graphguard.engine.function import apply
from graphguard.engine.monomial import Undescribed
from graphguard.engine.table import Table
from graphguard.engine.value import Value, add, concat, cut, multiply, permute, scale, taken, whole


def do_function(table, pair, draw):
    name, function = draw(st.sampled_from([("relu", lambda x: np.maximum(x, 0)), ("tanh", np.tanh)]))
    return Pair(apply(table, name, [pair.value]), [function(a) for a in pair.arrays])


def do_function_of_two(table, pair, draw):
    lanes = np.array([draw(st.integers(0, LANES - 1)) for _ in range(LANES)])
    value = apply(table, "maximum", [pair.value, taken(pair.value, lanes)])
    return Pair(value, [np.maximum(a, pair.arrays[lane]) for a, lane in zip(pair.arrays, lanes, strict=True)])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_functions_mean_what_numpy_computes_in_every_lane(data):
    steps = data.draw(st.lists(st.sampled_from([*STEPS, do_function, do_function_of_two]), max_size=4))
    walk(data, [*steps, do_function])


def inputs(table, names="xyz"):
    return [whole(table.input(name, (6, 6))) for name in names]


def test_a_function_of_a_shard_is_a_shard_of_the_function():
    table = Table()
    (x,) = inputs(table, "x")
    for dim, lanes in ((0, 2), (1, 3), (1, 6)):
        local, sequential = apply(table, "relu", [lane_shard(x, dim, lanes)]), lane_shard(apply(table, "relu", [x]), dim, lanes)
        assert only(local).monomial.factors[0].atom == only(sequential).monomial.factors[0].atom


def test_functions_of_equal_things_are_one_atom_however_they_are_written():
    table = Table()
    x, y, z = inputs(table)

    def atom(value):
        return only(value).monomial.factors[0].atom

    transposed = permute(apply(table, "tanh", [permute(x, (1, 0))]), (1, 0))
    assert atom(transposed) == atom(apply(table, "tanh", [x]))
    one, other = (apply(table, "tanh", [add(table, terms)]) for terms in ([x, y, z], [z, x, y]))
    assert atom(one) == atom(other)
    assert atom(one) != atom(apply(table, "tanh", [add(table, [x, y, scale(z, Fraction(2))])]))
    assert atom(apply(table, "clamp", [x], (0, 1))) != atom(apply(table, "clamp", [x], (0, 2)))
    assert atom(apply(table, "maximum", [x, y])) != atom(apply(table, "maximum", [y, x])), "nothing says that it commutes"
    assert atom(apply(table, "tanh", [add(table, [x, permute(y, (1, 0))])])) != atom(apply(table, "tanh", [add(table, [x, y])]))


def test_pieces_side_by_side_are_treated_piece_by_piece():
    table = Table()
    x, y, _ = inputs(table)
    both = concat(table, [cut(x, 0, 0, 2), cut(y, 0, 2, 6)], 0)
    result = apply(table, "relu", [both])
    assert {term.box[0] for term in result.terms} == {(0, 2), (2, 6)}
    again = concat(table, [apply(table, "relu", [cut(x, 0, 0, 2)]), apply(table, "relu", [cut(x, 0, 2, 6)])], 0)
    assert only(again).monomial.factors == only(apply(table, "relu", [x])).monomial.factors or only(again).box == (
        (0, 6),
        (0, 6),
    )


def test_a_function_of_zeros_is_not_taken_for_zero():
    table = Table()
    (x,) = inputs(table, "x")
    padded = concat(table, [x, Value((2, 6), ())], 0)
    Pair(apply(table, "exp", [padded]), [np.exp(np.concatenate([ARRAYS["x"], np.zeros((2, 6))]))] * LANES).check(table)


def test_a_function_of_a_partial_sum_is_refused():
    table = Table()
    x, y, _ = inputs(table)
    partial = multiply(table, [lane_shard(x, 1, 3), lane_shard(y, 0, 3)], ["ik", "kj"], "ij")
    with pytest.raises(Undescribed, match="relu of a partial sum"):
        apply(table, "relu", [partial])


@pytest.mark.parametrize("lanes", [2, 3, 6])
def test_a_tensor_parallel_mlp_is_the_sequential_one(lanes):
    """Forward and backward, with one hidden column per lane too; without the sum over the lanes it is not."""

    def mlp(table, x, a, b, summed, file):
        h = apply(table, "relu", [multiply(table, [x, a], ["mk", "kn"], "mn", file=file)])
        y = summed(multiply(table, [h, b], ["mk", "kn"], "mn", file=file))
        g = scale(y, Fraction(2))
        db = multiply(table, [h, g], ["mk", "mn"], "kn", file=file)
        dh = apply(table, "where_positive", [h, multiply(table, [g, b], ["mn", "kn"], "mk", file=file)])
        da = multiply(table, [x, dh], ["mk", "mn"], "kn", file=file)
        return y, db, da

    table = Table()
    x, a, b = inputs(table)
    sequential = mlp(table, x, a, b, lambda value: value, file=True)

    def over_lanes(value):
        return add(table, [taken(value, np.full(lanes, lane)) for lane in range(lanes)])

    def wanted(value, dim):
        return only(value if dim is None else lane_shard(value, dim, lanes)).monomial

    local = mlp(table, x, lane_shard(a, 1, lanes), lane_shard(b, 0, lanes), over_lanes, file=False)
    for mine, whole_value, dim in zip(local, sequential, (None, 0, 1), strict=True):
        assert [f.atom for f in only(mine).monomial.factors] == [f.atom for f in wanted(whole_value, dim).factors]
        assert sorted(map(str, only(mine).monomial.ranges.values())) == sorted(
            map(str, wanted(whole_value, dim).ranges.values())
        )
    hidden = apply(table, "relu", [multiply(table, [x, lane_shard(a, 1, lanes)], ["mk", "kn"], "mn")])
    forgotten = multiply(table, [hidden, lane_shard(b, 0, lanes)], ["mk", "kn"], "mn")
    assert [f.atom for f in only(forgotten).monomial.factors] != [f.atom for f in wanted(sequential[0], None).factors]
