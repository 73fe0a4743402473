"""Random programs over descriptions, evaluated in every lane, against numpy. An operation may decline, but not too often."""

import math
import signal
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from graphguard.engine.algebra.sums import folded, one_term
from graphguard.engine.algebra.value import taken
from graphguard.engine.interpret import Interpreter
from graphguard.engine.numeric.evaluator import Evaluator
from graphguard.engine.ranks import collective, semantics
from graphguard.engine.ranks.collective import groups_of
from graphguard.engine.store.table import Table
from graphguard.engine.tensors.ops import LABELS, Ops
from graphguard.engine.terms.lane import collapse
from graphguard.engine.terms.term import Undescribed, Value
from graphguard.lemmas.known import all_lemmas

LANES = 4
ROWS, COLUMNS, IDS = 8, 6, 5
_random = np.random.default_rng(7)
ARRAYS = {name: _random.normal(size=(ROWS, COLUMNS)) for name in "xyz"} | {"ids": _random.integers(0, IDS, (ROWS, COLUMNS))}
GROUPS = [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 1, 0, 2]], [[1, 0], [2, 3]]]
MOST_ELEMENTS = 600


class Pair:
    """A described tensor and what each lane really holds. `mask`: it holds zeros and ones; `whole`: whole numbers."""

    def __init__(self, value, arrays, mask=False, whole=False):
        self.value, self.arrays, self.mask, self.whole = value, [np.asarray(a, dtype=float) for a in arrays], mask, whole

    @property
    def shape(self):
        return self.arrays[0].shape

    def map(self, value, function, **facts):
        return Pair(value, [function(a) for a in self.arrays], **facts)


class World:
    """One table, and the choices of one example."""

    def __init__(self, draw=None):
        self._draw, self.table = draw, Table()
        self.ops = Ops(self.table)
        self.table.recording = False
        self.table.facts.declare(self.table.atom("input", "ids"), 0, IDS)

    def integer(self, low, high):
        return self._draw(st.integers(low, high))

    def choice(self, options):
        return options[self.integer(0, len(options) - 1)]

    def lanes(self, low, high):
        return np.array([self.integer(low, high) for _ in range(LANES)], dtype=np.int64)

    def input(self, name):
        value = Interpreter(self.table, all_lemmas()).input(name, ARRAYS[name].shape)
        return Pair(value, [ARRAYS[name]] * LANES, whole=name == "ids")

    def start(self):
        """An input, perhaps each lane its own part of it."""
        pair = self.input(self.choice("xyz"))
        return cut(self, pair) if self.integer(0, 1) else pair

    def groups(self):
        return groups_of(np.array(self.choice(GROUPS), dtype=np.int64))

    def like(self, pair):
        """Another tensor of the same shape: made of the same one, or a part of an input where that fits."""
        other = self.choice(["same", "relu", "input", "constant"])
        if other == "input" and len(pair.shape) == 2 and pair.shape[0] <= ROWS and pair.shape[1] <= COLUMNS:
            found = self.input(self.choice("xyz"))
            for dim, size in enumerate(pair.shape):
                found = cut_to(self, found, dim, size)
            return found
        if other == "relu":
            return pair.map(self.ops.fn("relu", pair.value), lambda a: np.maximum(a, 0))
        if other == "constant":
            weights = self.lanes(-2, 2)
            return Pair(self.ops.full(pair.shape, collapse(weights)), [np.full(pair.shape, w) for w in weights])
        return pair

    def check(self, pair):
        for lane, want in enumerate(pair.arrays):
            said = Evaluator(self.table, ARRAYS).value(pair.value, lane)
            assert said.shape == want.shape
            defined = np.isfinite(want)  # a claim is made where the program is defined
            np.testing.assert_allclose(
                said[defined], want[defined], rtol=1e-7, atol=1e-7 * (1 + np.abs(want[defined]).max(initial=0))
            )


# ---------------------------------------------------------------------- operations
def cut_to(w, pair, dim, width):
    starts = w.lanes(0, pair.shape[dim] - width)
    value = w.ops.cut(pair.value, dim, collapse(starts), collapse(starts + width))
    arrays = [np.take(a, range(s, s + width), dim) for a, s in zip(pair.arrays, starts, strict=True)]
    return Pair(value, arrays, pair.mask, pair.whole)


def cut(w, pair):
    dim = w.integer(0, len(pair.shape) - 1)
    return cut_to(w, pair, dim, w.integer(1, pair.shape[dim]))


def shard(w, pair):
    """Each lane the part of its own, as inputs are given."""
    dim = w.integer(0, len(pair.shape) - 1)
    width = max(1, pair.shape[dim] // LANES)
    starts = np.minimum(np.arange(LANES) * width, pair.shape[dim] - width)
    value = w.ops.cut(pair.value, dim, collapse(starts), collapse(starts + width))
    return Pair(value, [np.take(a, range(s, s + width), dim) for a, s in zip(pair.arrays, starts, strict=True)])


def add(w, pair):
    other = w.like(pair)
    return Pair(w.ops.add(pair.value, other.value), [a + b for a, b in zip(pair.arrays, other.arrays, strict=True)])


def scale(w, pair):
    number = w.choice([Fraction(-1), Fraction(2), Fraction(1, 3), Fraction(0)])
    return pair.map(w.ops.scale(pair.value, number), lambda a: a * float(number))


def permute(w, pair):
    order = list(range(len(pair.shape)))
    for place in range(len(order) - 1):
        other = w.integer(place, len(order) - 1)
        order[place], order[other] = order[other], order[place]
    return pair.map(w.ops.permute(pair.value, order), lambda a: a.transpose(order), mask=pair.mask)


def reshape(w, pair):
    count, shape = math.prod(pair.shape), []
    while count > 1 and len(shape) < 3:
        size = w.choice([d for d in range(1, count + 1) if count % d == 0])
        shape.append(size)
        count //= size
    shape = [*shape, count] if count > 1 or not shape else shape
    return pair.map(w.ops.reshape(pair.value, shape), lambda a: a.reshape(shape), mask=pair.mask)


def expand(w, pair):
    size = w.integer(1, 3)
    if math.prod(pair.shape) * size > MOST_ELEMENTS:
        size = 1
    shape = (size, *pair.shape)
    return pair.map(w.ops.expand(pair.value, shape), lambda a: np.broadcast_to(a, shape), mask=pair.mask)


def concat(w, pair):
    other, dim = w.like(pair), w.integer(0, len(pair.shape) - 1)
    value = w.ops.concat([pair.value, other.value], dim)
    return Pair(value, [np.concatenate([a, b], dim) for a, b in zip(pair.arrays, other.arrays, strict=True)])


def place(w, pair):
    dim, before, after = w.integer(0, len(pair.shape) - 1), w.lanes(0, 2), 3
    shape = list(pair.shape)
    shape[dim] += after
    arrays = [np.zeros(shape) for _ in range(LANES)]
    for array, part, start in zip(arrays, pair.arrays, before, strict=True):
        array[tuple(slice(start, start + n) if d == dim else slice(None) for d, n in enumerate(pair.shape))] = part
    return Pair(w.ops.place(pair.value, shape, dim, collapse(before)), arrays)


def multiply(w, pair):
    other = w.like(pair)
    return Pair(w.ops.mul(pair.value, other.value), [a * b for a, b in zip(pair.arrays, other.arrays, strict=True)])


def einsum(w, pair):
    """Over some dims of two tensors, one of them with its dims in another order."""
    other = w.like(pair)
    labels = LABELS[: len(pair.shape)]
    left = "".join(label for label in labels if w.integer(0, 1))
    value = w.ops.einsum([labels, labels[::-1]], left, pair.value, w.ops.permute(other.value, range(len(labels))[::-1]))
    rule = f"{labels},{labels[::-1]}->{left}"
    return Pair(value, [np.einsum(rule, a, b.transpose()) for a, b in zip(pair.arrays, other.arrays, strict=True)])


def total(w, pair):
    dims, keep = [d for d in range(len(pair.shape)) if w.integer(0, 1)], bool(w.integer(0, 1))
    return pair.map(w.ops.sum(pair.value, dims, keep), lambda a: a.sum(axis=tuple(dims), keepdims=keep))


def largest(w, pair):
    dims = [w.integer(0, len(pair.shape) - 1)]
    return pair.map(w.ops.max(pair.value, dims, True), lambda a: a.max(axis=tuple(dims), keepdims=True))


def power(w, pair):
    exponent = w.choice([Fraction(2), Fraction(-1), Fraction(1, 2), Fraction(3), Fraction(-1, 2), Fraction(0)])
    return pair.map(w.ops.power(pair.value, exponent), lambda a: quiet(np.power, a, float(exponent)))


def quiet(work, *args):
    with np.errstate(all="ignore"):
        return work(*args)


def exp(w, pair):
    calm = w.ops.fn("tanh", pair.value)
    return pair.map(w.ops.exp(w.ops.add(calm, calm)), lambda a: np.exp(2 * np.tanh(a)))


def log(w, pair):
    return pair.map(w.ops.log(pair.value), lambda a: quiet(np.log, a))


def function(w, pair):
    name, known = w.choice([("relu", lambda a: np.maximum(a, 0)), ("tanh", np.tanh), ("abs", np.abs), ("cos", np.cos)])
    return pair.map(w.ops.fn(name, pair.value), known)


def two_arguments(w, pair):
    other = w.like(pair)
    return Pair(w.ops.fn("maximum", pair.value, other.value), list(map(np.maximum, pair.arrays, other.arrays)))


COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal}


def compare(w, pair):
    """Identifiers or positions with a number of each lane: masks as programs write them."""
    name, limits = w.choice(list(COMPARISONS)), w.lanes(0, IDS)
    number = w.ops.full((), collapse(limits))
    if w.integer(0, 1):
        subject = cut(w, w.input("ids"))
    else:
        starts, step = w.lanes(0, 4), w.choice([1, 1, 2, -1])
        value = w.ops.scale(w.ops.arange(ROWS, collapse(starts)), step)
        subject = Pair(value, [step * (np.arange(ROWS) + s) for s in starts], whole=True)
    value = w.ops.compare(name, subject.value, number, True)
    arrays = [COMPARISONS[name](a, limit) for a, limit in zip(subject.arrays, limits, strict=True)]
    return Pair(value, arrays, mask=True)


def compare_positions(w, pair):
    """Of rows with columns, as causal masks do."""
    name, starts = w.choice(list(COMPARISONS)), w.lanes(0, 4)
    rows = w.ops.reshape(w.ops.arange(ROWS, collapse(starts)), (ROWS, 1))
    value = w.ops.compare(name, rows, w.ops.arange(COLUMNS), True)
    grids = [np.broadcast_arrays(np.arange(ROWS)[:, None] + s, np.arange(COLUMNS)) for s in starts]
    return Pair(value, [COMPARISONS[name](a, b) for a, b in grids], mask=True)


def negate(w, pair):
    mask = pair if pair.mask else w.choice([compare, compare_positions])(w, pair)
    return mask.map(w.ops.negate(mask.value), lambda a: 1 - a, mask=True)


def where(w, pair):
    mask = w.choice([compare, compare_positions, negate])(w, pair)
    a, b = (cut_like(w, mask.shape) for _ in range(2))
    value = w.ops.where(mask.value, a.value, b.value)
    return Pair(value, [np.where(m, x, y) for m, x, y in zip(mask.arrays, a.arrays, b.arrays, strict=True)])


def cut_like(w, shape):
    pair = w.input(w.choice("xyz"))
    if len(shape) == 1:
        pair = pair.map(w.ops.sum(pair.value, [1]), lambda a: a.sum(1))
    for dim, size in enumerate(shape):
        pair = cut_to(w, pair, dim, size)
    return pair


def one_hot(w, pair):
    shifts, dim = w.lanes(-2, 2), w.integer(0, 2)
    ids = cut(w, w.input("ids"))
    moved = w.ops.add(ids.value, w.ops.full((), collapse(shifts)))
    arrays = [np.moveaxis((a + s)[..., None] == np.arange(IDS), -1, dim) for a, s in zip(ids.arrays, shifts, strict=True)]
    return Pair(w.ops.one_hot(moved, IDS, dim), arrays, mask=True)


def one_hot_of_choice(w, pair):
    """`where(lo <= ids < hi, ids - lo, 0)`, then the rows of a table."""
    lows = np.arange(LANES) if w.integer(0, 1) else w.lanes(0, 2)
    size = w.integer(1, 3)
    ids = w.input("ids")
    low, high = w.ops.full((), collapse(lows)), w.ops.full((), collapse(lows + size))
    mask = w.ops.mul(w.ops.compare("ge", ids.value, low, True), w.ops.compare("lt", ids.value, high, True))
    chosen = w.ops.where(mask, w.ops.sub(ids.value, low), w.ops.zeros(ids.shape))
    known = ARRAYS["ids"]
    arrays = []
    for lane_low in lows:
        mine = np.where((known >= lane_low) & (known < lane_low + size), known - lane_low, 0)
        arrays.append(mine[..., None] == np.arange(size))
    return Pair(w.ops.one_hot(chosen, size, 2), arrays, mask=True)


def shifted(w, pair):
    lanes = w.lanes(0, LANES - 1)
    return Pair(taken(w.table, pair.value, lanes), [pair.arrays[lane] for lane in lanes])


def by_group(groups, pair, work):
    arrays = [None] * LANES
    for members in groups.members:
        for lane, result in zip(members, work([pair.arrays[m] for m in members]), strict=True):
            arrays[lane] = result
    return arrays


def all_reduce(w, pair):
    groups = w.groups()
    value = semantics.reduced(w.ops, pair.value, groups, {"reduce": "sum"})
    return Pair(value, by_group(groups, pair, lambda parts: [sum(parts)] * len(parts)))


def all_maximum(w, pair):
    groups = w.groups()
    value = semantics.reduced(w.ops, pair.value, groups, {"reduce": "max"})
    return Pair(value, by_group(groups, pair, lambda parts: [np.maximum.reduce(parts)] * len(parts)))


def all_gather(w, pair):
    groups, dim = w.groups(), w.integer(0, len(pair.shape) - 1)
    value = collective.all_gather(w.table, pair.value, dim, groups)
    return Pair(value, by_group(groups, pair, lambda parts: [np.concatenate(parts, dim)] * len(parts)))


def reduce_scatter(w, pair):
    groups, dim = w.groups(), w.integer(0, len(pair.shape) - 1)
    if pair.shape[dim] % groups.size:
        pair = pair.map(w.ops.concat([pair.value] * groups.size, dim), lambda a: np.concatenate([a] * groups.size, dim))
    value = collective.reduce_scatter(w.table, pair.value, dim, groups)
    return Pair(value, by_group(groups, pair, lambda parts: np.split(sum(parts), len(parts), dim)))


def all_to_all(w, pair):
    groups = w.groups()
    if pair.shape[0] % groups.size:
        pair = pair.map(w.ops.concat([pair.value] * groups.size, 0), lambda a: np.concatenate([a] * groups.size, 0))
    value = collective.all_to_all(w.table, pair.value, groups)

    def work(parts):
        rows = [np.split(part, len(parts)) for part in parts]
        return [np.concatenate([row[place] for row in rows]) for place in range(len(parts))]

    return Pair(value, by_group(groups, pair, work))


def fold(w, pair):
    return pair.map(folded(w.table, pair.value), lambda a: a)


def one(w, pair):
    return pair.map(one_term(w.table, folded(w.table, pair.value)), lambda a: a)


def settle(w, pair):
    terms = (w.table.settle(term) for term in pair.value.terms)
    return pair.map(Value(pair.value.shape, tuple(t for t in terms if t is not None)), lambda a: a)


def record(w, pair):
    """Name the sum of two tensors as the sequential program would; later sums may be found to be it."""
    w.table.recording = True
    try:
        x, y = w.input("x"), w.input(w.choice("yz"))
        one_term(w.table, w.ops.add(x.value, y.value))
        w.ops.sum(w.ops.mul(x.value, y.value), [w.integer(0, 1)])
    finally:
        w.table.recording = False
    return pair


OPERATIONS = (
    cut, shard, add, scale, permute, reshape, expand, concat, place, multiply, einsum, total, largest, power, exp, log,
    function, two_arguments, compare, compare_positions, negate, where, one_hot, one_hot_of_choice, shifted, all_reduce,
    all_maximum, all_gather, reduce_scatter, all_to_all, fold, one, settle,
)  # fmt: skip
BEFORE = (cut, shard, shard, add, scale, permute, reshape, concat, place, multiply, total, function, all_reduce, all_gather,
          where, shifted, record, record)  # fmt: skip
LEAST_DESCRIBED = 0.5
MOST_SECONDS = 30  # then it is said to hang


def _too_long(*_):
    raise AssertionError("it does not end")


def attempt(world, operation, pair):
    """The result, or None if it is declined or grows too large to compare."""
    if not pair.shape or math.prod(pair.shape) > MOST_ELEMENTS:
        return None
    signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        result = operation(world, pair)
    except Undescribed:
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return result if all(math.prod(a.shape) <= 4 * MOST_ELEMENTS for a in result.arrays) else None


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_operation(operation):
    seen = Counter()

    @settings(
        max_examples=40,
        phases=[Phase.generate],
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def example(data):
        world = World(data.draw)
        pair = world.start()
        for _ in range(world.integer(0, 3)):
            pair = attempt(world, world.choice(BEFORE), pair) or pair
        if not pair.shape:
            return
        seen["tried"] += 1
        result = attempt(world, operation, pair)
        if result is not None:
            seen["described"] += 1
            world.check(result)

    example()
    assert seen["described"] >= LEAST_DESCRIBED * seen["tried"], seen
