"""Sums that are compared element by element: what cancels is nothing in numbers, and what is something does not cancel."""

from fractions import Fraction
from random import Random

import numpy as np
import pytest

from graphguard.engine.algebra.names import Names
from graphguard.engine.algebra.one_by_one import cancel, summands
from graphguard.engine.limits import Limits, ProofStops
from graphguard.engine.store.table import Table
from graphguard.engine.terms.definition import Part
from graphguard.engine.terms.term import ONE, Factor, Index, Term

SIZE = 6


@pytest.fixture
def table():
    made = Table(ProofStops(Limits().for_paths()))
    made.folding = False
    return made


def at(*positions):
    """Positions: a number, a variable as "k", or a variable with a stride and an offset."""
    made = []
    for each in positions:
        variable, stride, offset = (
            each if isinstance(each, tuple) else (each, 1, 0) if isinstance(each, str) else (None, 0, each)
        )
        made.append(Index(((ord(variable), stride),) if variable else (), offset))
    return tuple(made)


def term(coefficient, *factors, **ranges):
    """A number: a product of (atom, positions, power), summed over ranges."""
    made = tuple(Factor(atom, at(*positions), Fraction(power)) for atom, positions, power in factors)
    return Term(Fraction(coefficient), made, {ord(v): (0, size) for v, size in ranges.items()}, (), ())


def sum_of(table, *parts, kind="sum", **ranges):
    """An atom that is a sum of products, and where it is read."""
    products = [
        Part((0, Fraction(number)), tuple(Factor(atom, at(*positions)) for atom, positions in factors), tuple(map(ord, bound)))
        for number, factors, bound in parts
    ]
    return table.define(kind, "sum", (), 1, products, {ord(v): (0, size) for v, size in ranges.items()})


# ---------------------------------------------------------------------- sums
def test_a_sum_is_its_elements_in_any_order(table):
    x = table.atom("input", "x")
    whole = term(1, (x, ["k"], 1), k=4)
    parts = [term(-1, (x, [n], 1)) for n in (2, 0, 3, 1)]
    assert summands([whole, *parts]) == 8
    assert cancel(table, [whole, *parts])
    assert not cancel(table, [whole, *parts[:3]])
    assert not cancel(table, [whole, *parts[:3], term(-1, (x, [4], 1))])


def test_elements_that_lie_apart(table):
    x, y = table.atom("input", "x"), table.atom("input", "y")
    steps = term(2, (x, [("k", 2, 1)], 1), (y, ["k"], 1), k=3)
    assert cancel(table, [steps, *(term(-2, (x, [2 * n + 1], 1), (y, [n], 1)) for n in range(3))])
    assert not cancel(table, [steps, *(term(-2, (x, [n + 1], 1), (y, [n], 1)) for n in range(3))])


def test_elements_that_meet_are_a_power(table):
    x = table.atom("input", "x")
    row = term(1, (x, ["k"], 1), (x, [1], 1), k=3)
    assert cancel(table, [row, term(-1, (x, [0], 1), (x, [1], 1)), term(-1, (x, [1], 2)), term(-1, (x, [1], 1), (x, [2], 1))])


def test_ranks_with_sums_of_different_lengths_are_not_counted(table):
    x = table.atom("input", "x")
    uneven = Term(ONE, (Factor(x, at("k")),), {ord("k"): (0, np.array([1, 2]))}, (), ())
    assert summands([uneven]) is None


# ---------------------------------------------------------------------- atoms that are one formula
def test_a_formula_is_the_same_whichever_of_its_positions_are_one(table):
    """Σ_k a[i, k] b[i, k] is what Σ_k a[i, k] b[j, k] is where i is j."""
    a, b = table.atom("input", "a"), table.atom("input", "b")
    one, _ = sum_of(table, (1, [(a, ["i", "k"]), (b, ["i", "k"])], "k"), i=SIZE, k=4)
    two, _ = sum_of(table, (1, [(a, ["i", "k"]), (b, ["j", "k"])], "k"), i=SIZE, j=SIZE, k=4)
    other, _ = sum_of(table, (1, [(a, ["i", "k"]), (b, ["j", "k"])], "k"), i=SIZE, j=SIZE, k=3)
    assert one is not two
    mine = term(1, (one, _read(table, one, 3, 3), 1))
    assert cancel(table, [mine, term(-1, (two, _read(table, two, 3, 3), 1))])
    assert not cancel(table, [mine, term(-1, (two, _read(table, two, 3, 4), 1))])
    assert not cancel(table, [mine, term(-1, (other, _read(table, other, 3, 3), 1))])


def _read(table, atom, first, second):
    """Where an atom is read: row `first` of one tensor, row `second` of the other, and from their beginning on."""
    positions = [0] * table.definitions[atom].axes
    (product,) = table.definitions[atom].operands[0]
    rows = [factor.at[0].terms[0][0] for factor in product.factors]
    for row, number in zip(rows, (first, second), strict=True):
        positions[-1 - row] = number
    return positions


def test_what_is_summed_has_no_name(table):
    """Σ_kl m[k, l] n[l, k] is one number, however its variables are called."""
    m = table.atom("input", "m")
    names = Names(table)
    found = set()
    for first, second in ("kl", "lk"):
        atom, read = sum_of(table, (1, [(m, [first, second])], "kl"), k=3, l=3)
        found.add(names.of_factor(Factor(atom, read), {}))
    assert len(found) == 1


# ---------------------------------------------------------------------- divisors
def test_shares_add_up_to_one(table):
    x = table.atom("input", "x")
    total, read = sum_of(table, (1, [(x, [0])], ""), (1, [(x, [1])], ""), kind="lin")
    where = [index.offset for index in read]
    shares = [term(1, (x, [n], 1), (total, where, -1)) for n in range(2)]
    assert cancel(table, [*shares, term(-1)])
    assert not cancel(table, [*shares, term(-2)])
    assert not cancel(table, [shares[0], term(-1)])
    squared = [term(1, (x, [n], 1), (x, [m], 1), (total, where, -2)) for n in range(2) for m in range(2)]
    assert cancel(table, [*squared, term(-1)])
    assert cancel(table, [*squared, *(share.with_(coefficient=-ONE) for share in shares)])


def test_what_may_be_zero_is_not_divided_away(table):
    x = table.atom("input", "x")
    assert not cancel(table, [term(1, (x, [0], 1), (x, [0], -1)), term(-1)])
    x.positive = x.nonnegative = True
    assert cancel(table, [term(1, (x, ["k"], 1), (x, [0], -1), k=1), term(-1)])


def test_roots_stay_apart(table):
    """√x √x is x only where x is not negative, and is not taken for it."""
    x = table.atom("input", "x")
    roots = term(1, (x, ["k"], "1/2"), (x, [0], "1/2"), k=1)
    assert not cancel(table, [roots, term(-1, (x, [0], 1))])


# ---------------------------------------------------------------------- at random
def value_of(terms, numbers):
    total = 0.0
    for each in terms:
        sizes = {v: span[1] for v, span in each.ranges.items()}
        for steps in np.ndindex(*sizes.values()):
            places = dict(zip(sizes, steps, strict=True))
            product = float(each.coefficient)
            for factor in each.factors:
                where = tuple(i.offset + sum(s * places[v] for v, s in i.terms) for i in factor.at)
                product *= numbers[factor.atom][where] ** float(factor.power)
            total += product
    return total


@pytest.mark.parametrize("seed", range(30))
def test_what_cancels_is_nothing_in_numbers(table, seed):
    random, generator = Random(seed), np.random.default_rng(seed)
    atoms = [table.atom("input", name) for name in "xyz"]
    numbers = {atom: generator.normal(size=(2 * SIZE, 2 * SIZE)) for atom in atoms}
    terms = []
    for _ in range(3):
        factors = [
            (
                random.choice(atoms),
                [(random.choice("kl"), random.choice([1, 2]), random.randrange(3)), random.choice(["k", 2])],
                1,
            )
            for _ in range(2)
        ]
        terms.append(term(random.choice([1, -2, 3]), *factors, k=random.randrange(1, 4), l=random.randrange(1, 4)))
    one_by_one = []
    for each in terms:
        for steps in np.ndindex(*(span[1] for span in each.ranges.values())):
            places = dict(zip(each.ranges, steps, strict=True))
            factors = tuple(
                f._replace(at=tuple(Index((), i.offset + sum(s * int(places[v]) for v, s in i.terms)) for i in f.at))
                for f in each.factors
            )
            one_by_one.append(Term(-each.coefficient, factors, {}, (), ()))
    random.shuffle(one_by_one)
    assert abs(value_of([*terms, *one_by_one], numbers)) < 1e-9
    assert cancel(table, [*terms, *one_by_one])
    for wrong in (one_by_one[1:], [*one_by_one, one_by_one[0]]):
        assert cancel(table, [*terms, *wrong]) == (abs(value_of([*terms, *wrong], numbers)) < 1e-9)
