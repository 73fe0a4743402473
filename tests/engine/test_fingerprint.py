"""The quick look before two descriptions are written out: it may let through what differs, and never stops what is equal."""

from fractions import Fraction

import pytest

from graphguard.engine.algebra.fingerprint import may_be_equal
from graphguard.engine.algebra.value import add, concat, scale
from graphguard.engine.interpret import Interpreter
from graphguard.engine.store.table import Table
from graphguard.engine.tensors.ops import Ops
from graphguard.engine.terms.term import ONE, Factor, Index, Term, Value
from graphguard.lemmas.known import all_lemmas


def halves(ops, x, weight=1):
    first, second = ops.sum(ops.cut(x, 0, 0, 4), [0]), ops.sum(ops.cut(x, 0, 4, 8), [0])
    return add(ops.table, [first, scale(second, Fraction(weight))])


def squares(ops, x):
    return ops.mul(ops.sum(x, [0]), ops.sum(x, [0]))


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (lambda o, x, y: halves(o, x), lambda o, x, y: o.sum(x, [0]), True),
        (lambda o, x, y: o.mul(o.sum(x, [0]), o.sum(y, [0])), lambda o, x, y: o.mul(o.sum(y, [0]), halves(o, x)), True),
        (lambda o, x, y: o.sum(add(o.table, [x, y]), [0]), lambda o, x, y: add(o.table, [o.sum(y, [0]), o.sum(x, [0])]), True),
        (lambda o, x, y: halves(o, x, 2), lambda o, x, y: o.sum(x, [0]), False),
        (lambda o, x, y: o.sum(o.cut(x, 0, 0, 7), [0]), lambda o, x, y: o.sum(x, [0]), False),
        (lambda o, x, y: squares(o, x), lambda o, x, y: o.sum(o.mul(x, x), [0]), False),
        (lambda o, x, y: o.sum(x, [0]), lambda o, x, y: o.sum(y, [0]), False),
        (lambda o, x, y: concat(o.table, [o.cut(x, 0, 4, 8), o.cut(x, 0, 0, 4)], 0), lambda o, x, y: x, False),
    ],
)
def test_sums_that_differ_are_told_apart(one, other, equal):
    ops = Ops(Table())
    ops.table.recording = False
    x, y = (Interpreter(ops.table, all_lemmas()).input(name, (8, 6)) for name in "xy")
    assert may_be_equal(ops.table, one(ops, x, y), other(ops, x, y)) is equal


def test_what_would_take_long_is_let_through():
    ops = Ops(Table())
    variables = [next(ops.table.names) for _ in range(2)]
    large = Factor(ops.table.atom("input", "x"), tuple(Index(((v, 1),)) for v in variables))
    total = Term(ONE, (large,), dict.fromkeys(variables, (0, 1 << 24)), (), ())
    assert may_be_equal(ops.table, Value((), (total,)), Value((), ()))
