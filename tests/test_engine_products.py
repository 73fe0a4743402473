"""The engine's first layer: what products of described tensors mean, and that sums are found again however they came about."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphguard.engine.evaluate import Evaluator
from graphguard.engine.lane import at_lane, collapse, varies
from graphguard.engine.monomial import Monomial, Undescribed, canonical, renamed
from graphguard.engine.product import product
from graphguard.engine.table import Table

RANDOM = np.random.default_rng(0)


def shard(monomial, dim, lanes):
    """Cut one dim evenly over the lanes; a dim of local size 1 becomes a point."""
    (variable,) = monomial.dims[dim]
    low, high = monomial.ranges[variable]
    size = (high - low) // lanes
    start = np.arange(lanes) * size
    ranges = {**monomial.ranges, variable: (collapse(start), collapse(start + size))}
    dims = tuple(() if i == dim and size == 1 else group for i, group in enumerate(monomial.dims))
    return Monomial(monomial.coefficient, monomial.factors, ranges, dims)


def all_reduced(table, monomial):
    """What the lanes hold in sum, where one summed range varies and the lanes' ranges abut."""
    (variable,) = [v for v in monomial.summed if varies(monomial.ranges[v][0])]
    low, high = monomial.ranges[variable]
    assert (high[:-1] == low[1:]).all()
    ranges = {**monomial.ranges, variable: (int(low[0]), int(high[-1]))}
    return table.fold(Monomial(monomial.coefficient, monomial.factors, ranges, monomial.dims))


def same(a, b):
    """Whether two descriptions are equal as data: the same product, the same ranges, the same dims."""

    def form(m):
        found = canonical(m.factors, m.summed, m.ranges)
        place = {v: n for n, v in enumerate(found.order)}
        spans = [(str(m.ranges[v][0]), str(m.ranges[v][1])) for v in found.order]
        return m.coefficient, found.key, spans, [[place[v] for v in group] for group in m.dims]

    return form(a) == form(b)


@st.composite
def contractions(draw):
    sizes = {label: draw(st.integers(1, 4)) for label in "abcd"}
    labels = [draw(st.text("abcd", min_size=1, max_size=3).filter(lambda t: len(set(t)) == len(t))) for _ in range(2)]
    present = sorted(set("".join(labels)))
    result = "".join(draw(st.permutations([label for label in present if draw(st.booleans())])))
    return sizes, labels, result


@settings(max_examples=80, deadline=None)
@given(contractions(), st.booleans())
def test_a_product_means_what_einsum_computes(contraction, filed):
    sizes, labels, result = contraction
    table = Table()
    arrays = {name: RANDOM.normal(size=[sizes[label] for label in text]) for name, text in zip("xy", labels, strict=True)}
    operands = [table.input(name, array.shape) for name, array in arrays.items()]
    described = product(table, operands, labels, result)
    described = table.file(described) if filed else described
    want = np.einsum(f"{labels[0]},{labels[1]}->{result}", *arrays.values())
    np.testing.assert_allclose(Evaluator(table, arrays).local(described), want, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from(["rows", "columns", "contracted"]))
def test_each_lane_holds_the_product_of_its_shards(lanes, size, where):
    table = Table()
    arrays = {"x": RANDOM.normal(size=(lanes * size, lanes * size)), "w": RANDOM.normal(size=(lanes * size, lanes * size))}
    x, w = (table.input(name, array.shape) for name, array in arrays.items())
    if where == "rows":
        x = shard(x, 0, lanes)
    elif where == "columns":
        w = shard(w, 1, lanes)
    else:
        x, w = shard(x, 1, lanes), shard(w, 0, lanes)
    described = table.fold(product(table, [x, w], ["mk", "kn"], "mn"))
    evaluator = Evaluator(table, arrays)
    for lane in range(lanes):
        want = evaluator.local(x, lane).reshape(-1, at_local(x, 1, lane)) @ evaluator.local(w, lane).reshape(
            at_local(w, 0, lane), -1
        )
        np.testing.assert_allclose(evaluator.local(described, lane).reshape(want.shape), want, atol=1e-12)


def at_local(monomial, dim, lane):
    spans = [monomial.ranges[v] for v in monomial.dims[dim]]
    return int(np.prod([at_lane(high, lane) - at_lane(low, lane) for low, high in spans], dtype=int))


@pytest.mark.parametrize("lanes", [2, 4, 8, 1024])
@pytest.mark.parametrize("size", [1, 3])
def test_partial_products_summed_over_the_lanes_are_the_sequential_product(lanes, size):
    table = Table()
    x, a, b = table.input("x", (4, 5)), table.input("a", (5, lanes * size)), table.input("b", (lanes * size, 6))
    hidden = table.file(product(table, [x, a], ["mk", "kn"], "mn"))
    sequential = table.file(product(table, [hidden, b], ["mk", "kn"], "mn"))
    local = table.fold(product(table, [x, shard(a, 1, lanes)], ["mk", "kn"], "mn"))
    partial = table.fold(product(table, [local, shard(b, 0, lanes)], ["mk", "kn"], "mn"))
    assert not same(partial, sequential)
    assert same(all_reduced(table, partial), sequential)


def test_associativity_is_found_by_look_up():
    table = Table()
    x, a, b = table.input("x", (4, 5)), table.input("a", (5, 7)), table.input("b", (7, 6))
    sequential = table.file(product(table, [table.file(product(table, [x, a], ["mk", "kn"], "mn")), b], ["mk", "kn"], "mn"))
    merged = table.fold(product(table, [x, table.fold(product(table, [a, b], ["kn", "no"], "ko"))], ["mk", "ko"], "mo"))
    assert same(merged, sequential)
    other = table.fold(product(table, [x, table.input("c", (5, 6))], ["mk", "ko"], "mo"))
    assert not same(other, sequential)


def test_two_uses_of_one_input_keep_their_variables_apart():
    table = Table()
    x = table.input("x", (3, 3))
    gram = table.file(product(table, [x, x], ["ik", "jk"], "ij"))
    square = table.file(product(table, [x, x], ["ik", "ik"], "i"))
    array = {"x": RANDOM.normal(size=(3, 3))}
    np.testing.assert_allclose(Evaluator(table, array).local(gram), array["x"] @ array["x"].T)
    np.testing.assert_allclose(Evaluator(table, array).local(square), (array["x"] ** 2).sum(1))
    assert gram.factors[0].atom != square.factors[0].atom


def test_a_part_of_the_range_is_not_the_whole():
    table = Table()
    x, w = table.input("x", (4, 8)), table.input("w", (8, 4))
    whole = table.file(product(table, [x, w], ["mk", "kn"], "mn"))
    part = product(table, [cut(x, 1, 0, 4), cut(w, 0, 0, 4)], ["mk", "kn"], "mn")
    assert not same(table.fold(part), whole)
    shifted = product(table, [cut(x, 1, 0, 4), cut(w, 0, 4, 8)], ["mk", "kn"], "mn")
    arrays = {"x": RANDOM.normal(size=(4, 8)), "w": RANDOM.normal(size=(8, 4))}
    evaluator = Evaluator(table, arrays)
    np.testing.assert_allclose(evaluator.local(table.fold(part)), arrays["x"][:, :4] @ arrays["w"][:4])
    np.testing.assert_allclose(evaluator.local(table.fold(shifted)), arrays["x"][:, :4] @ arrays["w"][4:])


def cut(monomial, dim, start, stop):
    (variable,) = monomial.dims[dim]
    return Monomial(monomial.coefficient, monomial.factors, {**monomial.ranges, variable: (start, stop)}, monomial.dims)


def test_a_sum_over_a_broadcast_counts_its_elements():
    table = Table()
    x = table.input("x", (3,))
    wide = Monomial(Fraction(1), x.factors, {**x.ranges, 999: (0, 5)}, (*x.dims, (999,)))
    total = table.file(product(table, [wide], ["ij"], "i"))
    assert total.coefficient == 5 and same(Monomial(Fraction(1), total.factors, total.ranges, total.dims), x)


@given(st.permutations(range(4)))
def test_names_do_not_matter(order):
    table = Table()
    x, w = table.input("x", (3, 4)), table.input("w", (4, 5))
    described = product(table, [x, w], ["mk", "kn"], "mn")
    again = renamed(described, iter([1000 + number for number in order]))
    assert same(described, again)


def test_shards_of_different_sizes_are_refused():
    table = Table()
    x, y = table.input("x", (6,)), table.input("y", (4,))
    with pytest.raises(Undescribed, match="does not split"):
        product(table, [x, y], ["i", "i"], "i")


def test_a_filed_sum_over_two_variables_is_not_found_where_one_is_still_in_use():
    table = Table()
    x, y, z = table.input("x", (3, 4)), table.input("y", (4, 5)), table.input("z", (5, 2))
    table.file(product(table, [x, y], ["ik", "kl"], "i"))
    chain = table.fold(product(table, [x, y, z], ["ik", "kl", "lj"], "ij"))
    arrays = {name: RANDOM.normal(size=size) for name, size in (("x", (3, 4)), ("y", (4, 5)), ("z", (5, 2)))}
    np.testing.assert_allclose(Evaluator(table, arrays).local(chain), arrays["x"] @ arrays["y"] @ arrays["z"])


@pytest.mark.parametrize("start", [0, 2, 3])
def test_a_dim_of_two_variables_splits_the_range_that_it_is_laid_over(start):
    """Aligned or not: positions 3 to 7 as two rows of two are not rows of a table with two columns."""
    table = Table()
    x, y = table.input("x", (8,)), table.input("y", (2, 2))
    joined = Monomial(y.coefficient, y.factors, y.ranges, (y.dims[0] + y.dims[1],))
    described = product(table, [cut(x, 0, start, start + 4), joined], ["i", "i"], "i")
    arrays = {"x": RANDOM.normal(size=8), "y": RANDOM.normal(size=(2, 2))}
    want = arrays["x"][start : start + 4] * arrays["y"].reshape(-1)
    np.testing.assert_allclose(Evaluator(table, arrays).local(described), want)
