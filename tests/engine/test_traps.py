"""Steps that look right and are not, each of which an engine of this kind has taken once."""

from fractions import Fraction

import numpy as np
import pytest

from graphguard.engine.algebra.value import add, concat, same, scale, taken
from graphguard.engine.interpret import Interpreter
from graphguard.engine.numeric.evaluator import Evaluator
from graphguard.engine.ranks.collective import all_gather, all_reduce, groups_of
from graphguard.engine.store.table import Table
from graphguard.engine.tensors.ops import Ops
from graphguard.engine.terms.term import Undescribed
from graphguard.graph.ir import Constant
from graphguard.lemmas.known import all_lemmas

ROWS, COLUMNS, LANES = 8, 6, 4
_random = np.random.default_rng(3)
ARRAYS = {name: _random.normal(size=(ROWS, COLUMNS)) for name in "xy"} | {"ids": _random.integers(0, 5, (ROWS, COLUMNS))}
EVERYONE = groups_of(np.array([[0, 1, 2, 3]]))
OWN = np.arange(LANES) * 2  # where each lane's rows begin


@pytest.fixture
def ops():
    table = Table()
    table.recording = False
    return Ops(table)


def tensor(ops, name):
    return Interpreter(ops.table, all_lemmas()).input(name, ARRAYS[name].shape)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_a_constant_without_elements_is_described(ops, shape):
    empty = Constant("float32", shape, b"")
    assert Interpreter(ops.table, all_lemmas()).constant(empty).shape == shape


def holds(ops, value, *wanted):
    """The description says, in each lane, what is wanted there."""
    lanes = wanted if len(wanted) == LANES else wanted * LANES
    for lane, want in enumerate(lanes):
        np.testing.assert_allclose(Evaluator(ops.table, ARRAYS).value(value, lane), want, atol=1e-10)


def rows(array, start, count):
    return array[start : start + count]


def test_ranges_that_overlap_do_not_merge(ops):
    x = tensor(ops, "x")
    both = add(ops.table, [ops.sum(ops.cut(x, 0, 0, 5), [0]), ops.sum(ops.cut(x, 0, 3, 8), [0])])
    assert not same(both, ops.sum(x, [0]))
    holds(ops, both, ARRAYS["x"][:5].sum(0) + ARRAYS["x"][3:].sum(0))


def test_ranges_that_leave_a_gap_do_not_merge(ops):
    x = tensor(ops, "x")
    both = add(ops.table, [ops.sum(ops.cut(x, 0, 0, 3), [0]), ops.sum(ops.cut(x, 0, 5, 8), [0])])
    assert not same(both, ops.sum(x, [0]))


def test_ranges_that_abut_in_some_lanes_only_do_not_merge(ops):
    x, ends = tensor(ops, "x"), np.array([4, 4, 4, 5])
    both = add(ops.table, [ops.sum(ops.cut(x, 0, 0, 4), [0]), ops.sum(ops.cut(x, 0, ends, 8), [0])])
    assert not same(both, ops.sum(x, [0]))
    holds(ops, both, *(ARRAYS["x"][:4].sum(0) + ARRAYS["x"][end:].sum(0) for end in ends))


@pytest.mark.parametrize(("end", "terms"), [(3, 2), (2, 3), (4, 3)])
def test_a_sum_everywhere_goes_on_where_sums_of_parts_end(ops, end, terms):
    """Rows from 3 on for all columns, and for each half of the columns some of those before."""
    x = tensor(ops, "x")
    parts = [ops.sum(ops.cut(ops.cut(x, 1, 3 * half, 3 * half + 3), 0, half, end), [0]) for half in (0, 1)]
    both = add(ops.table, [concat(ops.table, parts, 0), ops.sum(ops.cut(x, 0, 3, 8), [0])])
    assert len(both.terms) == terms
    before = np.concatenate([ARRAYS["x"][half:end, 3 * half : 3 * half + 3].sum(0) for half in (0, 1)])
    holds(ops, both, before + ARRAYS["x"][3:].sum(0))


def test_ranges_of_different_coefficient_do_not_merge(ops):
    x = tensor(ops, "x")
    both = add(ops.table, [ops.sum(ops.cut(x, 0, 0, 4), [0]), scale(ops.sum(ops.cut(x, 0, 4, 8), [0]), Fraction(2))])
    holds(ops, both, ARRAYS["x"][:4].sum(0) + 2 * ARRAYS["x"][4:].sum(0))


def test_an_overlap_is_fine_for_the_largest_alone(ops):
    x = tensor(ops, "x")
    parts = [ops.max(ops.cut(x, 0, 0, 5), [0]), ops.max(ops.cut(x, 0, 3, 8), [0])]
    holds(ops, ops.fn("maximum", *parts), ARRAYS["x"].max(0))


def test_summed_variables_are_renamed_apart_in_products(ops):
    total = ops.sum(tensor(ops, "x"), [0])
    square = ops.mul(total, total)
    holds(ops, square, ARRAYS["x"].sum(0) ** 2)
    assert not same(square, ops.sum(ops.mul(tensor(ops, "x"), tensor(ops, "x")), [0]))


def test_two_uses_of_one_partial_are_not_a_sum(ops):
    x = tensor(ops, "x")
    mine = ops.sum(ops.cut(x, 0, OWN, OWN + 2), [0])
    twice = add(ops.table, [mine, mine])
    holds(ops, twice, *(2 * rows(ARRAYS["x"], start, 2).sum(0) for start in OWN))
    holds(ops, all_reduce(ops.table, twice, EVERYONE), 2 * ARRAYS["x"].sum(0))


def test_a_dim_of_one_does_not_drift_into_its_neighbour(ops):
    """With one row for each lane, [1, 6] to [6] and a gather are not [2, 3] parts of something else."""
    x = tensor(ops, "x")
    mine = ops.cut(x, 0, np.arange(LANES), np.arange(LANES) + 1)
    flat = ops.reshape(mine, (COLUMNS,))
    gathered = ops.reshape(all_gather(ops.table, flat, 0, EVERYONE), (LANES, COLUMNS))
    holds(ops, gathered, ARRAYS["x"][:LANES])
    side_by_side = all_gather(ops.table, ops.reshape(mine, (COLUMNS, 1)), 1, EVERYONE)
    holds(ops, side_by_side, ARRAYS["x"][:LANES].T)
    assert same(ops.permute(side_by_side, (1, 0)), gathered)


def test_a_position_and_a_fraction_of_it_are_correlated(ops):
    """Heads and their groups: x[h] beside y[h // 2] is not x[h] beside y[g] for all h and g."""
    x, y = tensor(ops, "x"), tensor(ops, "y")
    groups = ops.reshape(ops.expand(ops.reshape(ops.cut(y, 0, 0, 4), (4, 1, COLUMNS)), (4, 2, COLUMNS)), (ROWS, COLUMNS))
    want = ARRAYS["x"] * np.repeat(ARRAYS["y"][:4], 2, 0)
    product = ops.mul(x, groups)
    holds(ops, product, want)
    holds(ops, ops.cut(product, 0, OWN, OWN + 2), *(rows(want, start, 2) for start in OWN))
    holds(ops, ops.sum(product, [0]), want.sum(0))


def test_a_cancelled_factor_under_a_sum_leaves_its_extent(ops):
    positive = ops.exp(tensor(ops, "x"))
    one = ops.mul(positive, ops.power(positive, -1))
    holds(ops, ops.sum(one, [0]), np.full(COLUMNS, ROWS))
    holds(ops, ops.sum(ops.cut(one, 0, OWN, OWN + 2), [0]), np.full(COLUMNS, 2))


def test_a_cancelled_factor_in_a_dim_leaves_a_broadcast(ops):
    positive = ops.exp(tensor(ops, "x"))
    one = ops.mul(positive, ops.power(positive, -1))
    assert same(one, ops.ones((ROWS, COLUMNS)))


def test_what_may_be_zero_does_not_cancel(ops):
    x = tensor(ops, "x")
    assert not same(ops.mul(x, ops.power(x, -1)), ops.ones((ROWS, COLUMNS)))


def test_the_root_of_a_square_is_not_the_number(ops):
    x = tensor(ops, "x")
    root = ops.power(ops.power(x, 2), Fraction(1, 2))
    assert not same(root, x)
    holds(ops, root, np.abs(ARRAYS["x"]))


def test_a_root_of_a_product_is_not_a_product_of_roots(ops):
    x, y = tensor(ops, "x"), tensor(ops, "y")
    product = ops.power(ops.mul(ops.mul(x, y), ops.mul(x, y)), Fraction(1, 2))
    holds(ops, product, np.abs(ARRAYS["x"] * ARRAYS["y"]))


def test_the_root_of_a_negative_multiple_keeps_its_sign_inside(ops):
    x = ops.scale(ops.power(tensor(ops, "x"), 2), Fraction(-1))
    root = ops.power(ops.power(x, 2), Fraction(1, 2))
    holds(ops, root, ARRAYS["x"] ** 2)


def test_the_log_of_a_square_is_not_twice_the_log(ops):
    x = tensor(ops, "x")
    logarithm = ops.log(ops.power(x, 2))
    assert not same(logarithm, ops.scale(ops.log(x), 2))
    holds(ops, logarithm, np.log(ARRAYS["x"] ** 2))


def test_a_one_hot_sums_to_one_only_in_a_declared_range(ops):
    free = ops.sum(ops.one_hot(tensor(ops, "ids"), 5, 2), [2])
    assert not same(free, ops.ones((ROWS, COLUMNS)))
    table = Table()
    table.recording = False
    bounded = Ops(table)
    table.facts.declare(table.atom("input", "ids"), 0, 5)
    assert same(bounded.sum(bounded.one_hot(tensor(bounded, "ids"), 5, 2), [2]), bounded.ones((ROWS, COLUMNS)))
    assert not same(bounded.sum(bounded.one_hot(tensor(bounded, "ids"), 4, 2), [2]), bounded.ones((ROWS, COLUMNS)))


def test_copies_of_one_tile_do_not_cover_a_tensor(ops):
    x = tensor(ops, "x")
    starts = np.array([0, 2, 2, 6])
    gathered = all_gather(ops.table, ops.cut(x, 0, starts, starts + 2), 0, EVERYONE)
    assert not same(gathered, x)
    holds(ops, gathered, np.concatenate([rows(ARRAYS["x"], start, 2) for start in starts]))


def test_tiles_in_another_order_do_not_cover_a_tensor(ops):
    x = tensor(ops, "x")
    starts = OWN[[1, 0, 2, 3]]
    gathered = all_gather(ops.table, ops.cut(x, 0, starts, starts + 2), 0, EVERYONE)
    assert not same(gathered, x)


def test_replicated_partials_are_not_summed_over_all_ranks(ops):
    """Two ranks hold each part: the sum over all four is twice the whole."""
    x, starts = tensor(ops, "x"), np.array([0, 0, 4, 4])
    mine = ops.sum(ops.cut(x, 0, starts, starts + 4), [0])
    total = all_reduce(ops.table, mine, EVERYONE)
    assert not same(total, ops.sum(x, [0]))
    holds(ops, total, 2 * ARRAYS["x"].sum(0))
    across = groups_of(np.array([[0, 2], [1, 3]]))
    assert same(all_reduce(ops.table, mine, across), ops.sum(x, [0]))


def test_a_value_of_the_lane_crosses_lanes_by_reindexing_alone(ops):
    weights = np.array([1, 2, 3, 4])
    mine = ops.mul(tensor(ops, "x"), ops.full((ROWS, COLUMNS), weights))
    holds(ops, taken(ops.table, mine, np.array([3, 3, 0, 0])), *(ARRAYS["x"] * w for w in (4, 4, 1, 1)))
    holds(ops, all_reduce(ops.table, mine, EVERYONE), ARRAYS["x"] * 10)


def test_whole_number_arithmetic_is_not_real_arithmetic(ops):
    ids = tensor(ops, "ids")
    halves = ops.fn("floor_divide", ids, ops.full((ROWS, COLUMNS), 2))
    assert not same(halves, ops.scale(ids, Fraction(1, 2)))
    assert not same(ops.scale(halves, 2), ids)
    holds(ops, halves, ARRAYS["ids"] // 2)
    assert not same(ops.fn("trunc", tensor(ops, "x")), tensor(ops, "x"))


def test_a_comparison_of_reals_is_not_one_of_whole_numbers(ops):
    """Below 2 is at most 1 for whole numbers alone."""
    x, ids = tensor(ops, "x"), tensor(ops, "ids")
    ops.table.facts.declare(ops.table.atom("input", "ids"), 0, 5)
    one, two = ops.full((), 1), ops.full((), 2)
    assert not same(ops.compare("lt", x, two, False), ops.compare("le", x, one, False))
    assert same(ops.compare("lt", ids, two, True), ops.compare("le", ids, one, True))


def test_a_mask_of_lanes_with_a_limit_at_the_end_of_the_range(ops):
    """Nothing lies above the largest value: in those lanes the mask is empty."""
    ops.table.facts.declare(ops.table.atom("input", "ids"), 0, 5)
    limits = np.array([0, 0, 3, 4])
    mask = ops.compare("gt", tensor(ops, "ids"), ops.full((), limits), True)
    holds(ops, mask, *(ARRAYS["ids"] > limit for limit in limits))


def test_a_lane_without_rows_has_no_share(ops):
    """Uneven shards may leave a lane nothing; its share of a sum is zero, not what another lane holds."""
    x, starts, stops = tensor(ops, "x"), np.array([0, 3, 6, 8]), np.array([3, 6, 8, 8])
    mine = ops.sum(ops.cut(x, 0, starts, stops), [0])
    holds(ops, mine, *(ARRAYS["x"][a:b].sum(0) for a, b in zip(starts, stops, strict=True)))
    try:
        total = all_reduce(ops.table, mine, EVERYONE)
    except Undescribed:
        return
    holds(ops, total, ARRAYS["x"].sum(0))
