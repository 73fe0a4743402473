"""The engine's second layer: sums of placed monomials, against numpy, lane by lane."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphguard.engine.evaluate import Evaluator
from graphguard.engine.monomial import Undescribed
from graphguard.engine.shape import expand
from graphguard.engine.table import Table
from graphguard.engine.value import Value, add, concat, cut, multiply, permute, scale, taken, whole

LANES = 3
ARRAYS = {name: np.random.default_rng(7).normal(size=(6, 6)) for name in "xyz"}


def weight(table, factors, spans):
    """How many positions the evaluator visits at once: those of a product, times those inside its heaviest atom."""
    own = np.prod([np.max(high) - np.min(low) for low, high in spans], dtype=float)
    inside = [1.0]
    for factor in factors:
        if factor.atom.kind == "sum":
            inner, summed, _ = table.sums[factor.atom.id]
            inside.append(weight(table, inner, summed.values()))
        elif factor.atom.kind == "function":
            for operand in table.functions[factor.atom.id].operands:
                inside += [weight(table, inner, [span for _, span in summed]) for _, inner, summed in operand]
    return own * max(inside)


class Pair:
    """A described value and what each lane really holds."""

    def __init__(self, value, arrays):
        self.value, self.arrays = value, arrays

    def is_small(self, table):
        """Whether the evaluator, which lays out every combination of positions, can take it."""
        terms = [term.monomial for term in self.value.terms]
        return all(weight(table, m.factors, m.ranges.values()) < 1e6 for m in terms)

    def check(self, table):
        for lane, want in enumerate(self.arrays):
            np.testing.assert_allclose(Evaluator(table, ARRAYS).value(self.value, lane), want, atol=1e-10)


def start(table, name):
    return Pair(whole(table.input(name, (6, 6))), [ARRAYS[name]] * LANES)


def do_cut(table, pair, draw):
    """Each lane its own part of a dim, all of one size, so that shapes stay equal."""
    dim = draw(st.integers(0, 1))
    size = pair.arrays[0].shape[dim]
    width = draw(st.integers(1, size))
    starts = np.array([draw(st.integers(0, size - width)) for _ in range(LANES)])
    value = cut(pair.value, dim, starts, starts + width)
    arrays = [np.take(a, range(s, s + width), dim) for a, s in zip(pair.arrays, starts, strict=True)]
    return Pair(value, arrays)


def do_permute(table, pair, draw):
    return Pair(permute(pair.value, (1, 0)), [a.T for a in pair.arrays])


def do_scale(table, pair, draw):
    factor = draw(st.sampled_from([Fraction(0), Fraction(-2), Fraction(1, 3)]))
    return Pair(scale(pair.value, factor), [float(factor) * a for a in pair.arrays])


def do_take(table, pair, draw):
    lanes = np.array([draw(st.integers(0, LANES - 1)) for _ in range(LANES)])
    return Pair(taken(pair.value, lanes), [pair.arrays[lane] for lane in lanes])


def do_concat(table, pair, draw):
    dim = draw(st.integers(0, 1))
    other = do_take(table, pair, draw)
    arrays = [np.concatenate(both, dim) for both in zip(pair.arrays, other.arrays, strict=True)]
    return Pair(concat(table, [pair.value, other.value], dim), arrays)


def do_add(table, pair, draw):
    other = do_take(table, pair, draw)
    return Pair(add(table, [pair.value, other.value]), [a + b for a, b in zip(pair.arrays, other.arrays, strict=True)])


def do_multiply(table, pair, draw):
    labels, result = draw(
        st.sampled_from([(["ik", "jk"], "ij"), (["ij", "ij"], "ij"), (["ij", "ij"], "ji"), (["ki", "kj"], "ij")])
    )
    other = do_take(table, pair, draw)
    arrays = [np.einsum(f"{labels[0]},{labels[1]}->{result}", a, b) for a, b in zip(pair.arrays, other.arrays, strict=True)]
    return Pair(multiply(table, [pair.value, other.value], labels, result), arrays)


STEPS = [do_cut, do_permute, do_scale, do_take, do_concat, do_add, do_multiply]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_operation_means_what_numpy_computes_in_every_lane(data):
    walk(data, data.draw(st.lists(st.sampled_from(STEPS), max_size=4)))


def walk(data, steps):
    """Take the steps one by one, and compare what is described with what numpy computes after each."""
    table = Table()
    pair = start(table, data.draw(st.sampled_from("xyz")))
    for step in steps:
        try:
            pair = step(table, pair, data.draw)
        except Undescribed:
            return
        if not pair.is_small(table):
            return
        pair.check(table)


def lane_shard(value, dim, lanes):
    size = value.shape[dim] // lanes
    return cut(value, dim, np.arange(lanes) * size, np.arange(lanes) * size + size)


def only(value):
    (term,) = value.terms
    return term


@pytest.mark.parametrize("lanes", [2, 3, 6])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_put_side_by_side_are_the_whole_again(lanes, dim):
    table = Table()
    x = whole(table.input("x", (6, 6)))
    shard = lane_shard(x, dim, lanes)
    gathered = concat(table, [taken(shard, np.full(lanes, lane)) for lane in range(lanes)], dim)
    assert only(gathered).box == only(x).box
    assert {*only(gathered).monomial.ranges.values()} == {(0, 6)}, "one term, whole, with one row per lane too"


@pytest.mark.parametrize("lanes", [2, 6])
def test_parts_of_a_contraction_add_up_to_the_filed_sum(lanes):
    table = Table()
    x, w = whole(table.input("x", (6, 6))), whole(table.input("y", (6, 6)))
    sequential = multiply(table, [x, w], ["ik", "kj"], "ij", file=True)
    partial = multiply(table, [lane_shard(x, 1, lanes), lane_shard(w, 0, lanes)], ["ik", "kj"], "ij")
    total = add(table, [taken(partial, np.full(lanes, lane)) for lane in range(lanes)])
    assert only(total).monomial.factors[0].atom == only(sequential).monomial.factors[0].atom
    twice = add(table, [total, taken(partial, np.zeros(lanes, dtype=int))])
    assert len(twice.terms) == 2, "a part that is counted twice is not swallowed"


def test_opposite_terms_cancel():
    table = Table()
    x = whole(table.input("x", (6, 6)))
    assert add(table, [x, scale(x, Fraction(-1))]) == Value((6, 6), ())


def test_pieces_in_another_order_are_another_tensor():
    table = Table()
    x = whole(table.input("x", (6, 6)))
    swapped = concat(table, [cut(x, 0, 3, 6), cut(x, 0, 0, 3)], 0)
    assert len(swapped.terms) == 2
    np.testing.assert_allclose(Evaluator(table, ARRAYS).value(swapped), np.concatenate([ARRAYS["x"][3:], ARRAYS["x"][:3]]))


def test_a_piece_in_zeros_is_covered_nowhere_else():
    table = Table()
    x = whole(table.input("x", (6, 6)))
    padded = concat(table, [Value((2, 6), ()), cut(x, 0, 1, 3), Value((1, 6), ())], 0)
    want = np.concatenate([np.zeros((2, 6)), ARRAYS["x"][1:3], np.zeros((1, 6))])
    np.testing.assert_allclose(Evaluator(table, ARRAYS).value(padded), want)


# ---------------------------------------------------------------------- what must not be joined
def close(table, value, want, lane=0):
    np.testing.assert_allclose(Evaluator(table, ARRAYS).value(value, lane), want, atol=1e-10)


def test_two_parts_added_in_one_place_are_not_one_longer_part():
    table = Table()
    x = whole(table.input("x", (6, 6)))
    total = add(table, [cut(x, 0, 0, 3), cut(x, 0, 3, 6)])
    assert len(total.terms) == 2
    close(table, total, ARRAYS["x"][:3] + ARRAYS["x"][3:])


def contraction_part(table, start, stop, file=False):
    x, y = whole(table.input("x", (6, 6))), whole(table.input("y", (6, 6)))
    return multiply(table, [cut(x, 1, start, stop), cut(y, 0, start, stop)], ["ik", "kj"], "ij", file=file)


@pytest.mark.parametrize(("first", "second"), [((0, 3), (2, 6)), ((0, 2), (3, 6)), ((3, 6), (3, 6))])
def test_ranges_that_overlap_or_leave_a_gap_are_not_joined(first, second):
    table = Table()
    whole_sum = contraction_part(table, 0, 6, file=True)
    total = add(table, [contraction_part(table, *first), contraction_part(table, *second)])
    assert total.terms != whole_sum.terms
    x, y = ARRAYS["x"], ARRAYS["y"]
    close(table, total, sum(x[:, a:b] @ y[a:b] for a, b in (first, second)))


def test_parts_with_different_coefficients_are_not_joined():
    table = Table()
    total = add(table, [scale(contraction_part(table, 0, 3), Fraction(2)), contraction_part(table, 3, 6)])
    x, y = ARRAYS["x"], ARRAYS["y"]
    close(table, total, 2 * x[:, :3] @ y[:3] + x[:, 3:] @ y[3:])


def test_parts_that_differ_in_two_ranges_are_not_joined():
    table = Table()
    x, y, z = (whole(table.input(name, (6, 6))) for name in "xyz")

    def corner(start, stop):
        left = multiply(table, [cut(x, 1, start, stop), cut(cut(y, 0, start, stop), 1, start, stop)], ["ik", "kl"], "il")
        return multiply(table, [left, cut(z, 0, start, stop)], ["il", "lj"], "ij")

    x, y, z = (whole(table.input(name, (6, 6))) for name in "xyz")
    total = add(table, [corner(0, 3), corner(3, 6)])
    parts = [ARRAYS["x"][:, s] @ ARRAYS["y"][s, s] @ ARRAYS["z"][s] for s in (slice(0, 3), slice(3, 6))]
    close(table, total, sum(parts))


def test_shifts_that_differ_between_lanes_move_with_the_lane():
    table = Table()
    x, y = whole(table.input("x", (6, 6))), whole(table.input("y", (6, 6)))
    starts = np.array([0, 2, 3])
    shifted = multiply(table, [cut(x, 0, 0, 3), cut(y, 0, starts, starts + 3)], ["ij", "ij"], "ij")
    seen = taken(shifted, np.array([2, 0, 1]))
    for lane, start in enumerate([3, 0, 2]):
        close(table, seen, ARRAYS["x"][:3] * ARRAYS["y"][start : start + 3], lane)


def test_a_row_of_a_product_is_a_row_of_the_filed_product():
    table = Table()
    x, y = whole(table.input("x", (6, 6))), whole(table.input("y", (6, 6)))
    full = multiply(table, [x, y], ["ik", "kj"], "ij", file=True)
    row = multiply(table, [cut(x, 0, 2, 3), y], ["ik", "kj"], "ij", file=True)
    assert only(row).monomial.factors[0].atom == only(full).monomial.factors[0].atom
    close(table, row, ARRAYS["x"][2:3] @ ARRAYS["y"])


def test_a_sum_over_a_repeated_dim_of_different_sizes_is_refused():
    """Each lane would count its own number of copies, which one coefficient cannot say."""
    table = Table()
    row = cut(whole(table.input("x", (6, 6))), 0, 0, 1)
    ragged = expand(table, row, (np.array([2, 3]), 6))
    close(table, ragged, np.broadcast_to(ARRAYS["x"][:1], (3, 6)), lane=1)
    with pytest.raises(Undescribed, match="a sum over a repeated dim whose size differs between lanes"):
        multiply(table, [ragged], ["ij"], "j")
