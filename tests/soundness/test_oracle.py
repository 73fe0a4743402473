"""The oracle itself: it sees a wrong proof of any dtype and any relation, it draws what programs break at, and rounding,
overflow and the order of equal elements are no difference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import fails, judged

import graphguard as gg
from graphguard import Partial, Replicate, Shard
from graphguard.engine.proof import Relation
from graphguard.relation.arrangement import Arrangement, Tile

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
                  torch.float32, torch.float64, torch.complex64)
}  # fmt: skip
ROWS, COLUMNS = 5, 4


def verdict(sequential, distributed, inputs, **options):
    return gg.verify(sequential, distributed, mesh={"tp": 2}, inputs=inputs, **options).verdict


# ---------------------------------------------------------------------- a wrong proof is contradicted
def same(**inputs):
    return inputs


def other(x):
    """Another number, of any dtype; larger, where there is an order."""
    return ~x if x.dtype == torch.bool else x + 1


def less(x):
    return ~x if x.dtype == torch.bool else x - 1


def spoilt(x, make=other):
    """One element is wrong, and only on rank 1."""
    if dist.get_rank() == 0:
        return x.clone()
    y = x.clone()
    y[-1, -1] = make(x[-1, -1])
    return y


def rows(x):
    return x[:3].clone() if dist.get_rank() == 0 else x[3:].clone()


def halves(x):
    return x.chunk(2, 1)[dist.get_rank()].clone()


def parts(x):
    return x.clone() if dist.get_rank() == 0 else torch.zeros_like(x)


def swapped(x):
    return x[3:].clone() if dist.get_rank() == 0 else x[:3].clone()


TILES = Arrangement(
    (ROWS, COLUMNS),
    {0: (Tile(((3, ROWS), (0, COLUMNS)), (0, 1), (2, COLUMNS)),), 1: (Tile(((0, 3), (0, COLUMNS)), (0, 1), (3, COLUMNS)),)},
)
RELATIONS = {
    "replicate": (lambda x: x.clone(), spoilt, "Replicate"),
    "shard": (halves, lambda x: spoilt(halves(x)), "Shard(1)"),
    "uneven shard": (rows, lambda x: spoilt(rows(x)), "Shard(0)"),
    "sum": (parts, lambda x: spoilt(parts(x)), "Partial(sum)"),
    "avg": (lambda x: x.clone(), spoilt, "Partial(avg)"),
    "max": (lambda x: x.clone(), spoilt, "Partial(max)"),
    "min": (lambda x: x.clone(), lambda x: spoilt(x, less), "Partial(min)"),
    "arrangement": (swapped, lambda x: spoilt(swapped(x)), TILES),
    "stated": (lambda x: x.t().contiguous(), lambda x: spoilt(x.t().contiguous()), lambda full, coord: full.t()),
}


@pytest.mark.parametrize("kind", RELATIONS)
def test_a_wrong_proof_is_contradicted_whatever_the_dtype(kind):
    right, wrong, relation = RELATIONS[kind]
    ordered = {name: dtype for name, dtype in DTYPES.items() if not (kind in ("max", "min") and dtype.is_complex)}
    # Where one of two truth values is wrong, the largest is not always.
    names = [name for name in ordered if not (name == "bool" and kind in ("max", "min", "sum"))]
    inputs = {name: gg.Input((ROWS, COLUMNS), dtype=DTYPES[name]) for name in names}
    stated = dict.fromkeys(names, relation) if callable(relation) else None
    placements = (("tp", relation),) if isinstance(relation, str) else None
    arrangement = relation if isinstance(relation, Arrangement) else None
    proved = {name: Relation(name, name, placements, arrangement=arrangement) for name in names}
    fine = judged(same, lambda **given: {name: right(x) for name, x in given.items()}, inputs, outputs=stated, proved=proved)
    assert fine.contradicted == () and not fine.skipped and not fine.undecided
    off = judged(same, lambda **given: {name: wrong(x) for name, x in given.items()}, inputs, outputs=stated, proved=proved)
    assert off.contradicted == tuple(names)


def test_a_wrong_reduction_of_truth_values_is_contradicted():
    inputs = {"x": gg.Input((64,), dtype=torch.bool)}
    for placement in ("Partial(max)", "Partial(min)", "Partial(sum)"):
        proved = {"out": Relation("out", "out", (("tp", placement),))}
        assert judged(lambda x: x, lambda x: x ^ (torch.arange(64) % 2 == 0), inputs, proved=proved).contradicted == ("out",)
        assert not judged(lambda x: x, lambda x: x.clone(), inputs, proved=proved).contradicted


def test_a_truth_value_that_differs_is_refuted():
    inputs = {"x": gg.Input((8,)), "y": gg.Input((8,))}
    found = judged(lambda x, y: x > y, lambda x, y: x >= y, inputs)  # on ties alone
    assert found.different and fails(found.counterexample.script)


# ---------------------------------------------------------------------- what is drawn
X = {"x": gg.Input((6,)), "y": gg.Input((6,))}


@pytest.mark.parametrize(
    ("sequential", "distributed"),
    [
        (lambda x, y: y * 1, lambda x, y: y + 0 * torch.remainder(y, x)),
        (lambda x, y: y * 1, lambda x, y: y + 0 * (y / x)),
        (lambda x, y: y * 1, lambda x, y: y.log().exp()),
        (lambda x, y: x.abs(), lambda x, y: x * (x > 0)),
        (lambda x, y: x.sign(), lambda x, y: torch.where(x < 0, -1.0, 1.0)),
        (lambda x, y: (x > 0.75) * 1.0, lambda x, y: (x >= 0.75) * 1.0),
        (lambda x, y: x.max(0).indices, lambda x, y: 5 - x.flip(0).max(0).indices),  # the first of the largest
        (lambda x, y: x.clamp(max=0.0), lambda x, y: torch.where(x > 0, x * 0, x) + (x == 0)),
    ],
    ids=["remainder", "division", "log", "negatives", "sign", "threshold", "ties", "zero"],
)
def test_zeros_negatives_and_ties_are_drawn(sequential, distributed):
    assert judged(sequential, distributed, X).different
    assert not judged(sequential, sequential, X).different


def test_the_ends_of_ranges_are_drawn():
    far = {"x": gg.Input((4, 3), low=0.0, high=1000.0)}
    assert judged(lambda x: x.long(), lambda x: x.to(torch.int8).long(), far).different
    near = {"x": gg.Input((4, 3), low=0.0, high=127.5)}
    assert not judged(lambda x: x.long(), lambda x: x.to(torch.int8).long(), near).different
    whole = {"i": gg.Input((4,), dtype=torch.int64, low=-3, high=1000)}
    assert judged(lambda i: i * 1, lambda i: i.clamp(max=998), whole).different
    assert judged(lambda i: i * 1, lambda i: i.clamp(min=-2), whole).different
    assert not judged(lambda i: i * 1, lambda i: i.clamp(-3, 999), whole).different


def test_every_id_is_drawn_once():
    def missing(i):
        return torch.zeros(8, dtype=torch.int64).index_add(0, i, torch.ones_like(i)).eq(1).all()

    inputs = {"i": gg.Input((8,), dtype=torch.int64, low=0, high=8)}
    assert judged(missing, lambda i: missing(i) & False, inputs).different


def test_narrow_whole_numbers_wrap():
    def total(x):
        return x.view(2, 2, 3).long().sum(0)

    def of_ranks(x):
        y = x.clone()
        dist.all_reduce(y)
        return y.long()

    for options in ({}, {"low": 0, "high": 256}):
        inputs = {"x": gg.Input((4, 3), Shard(0), torch.uint8, **options)}
        assert judged(total, of_ranks, inputs).different
    small = {"x": gg.Input((4, 3), Shard(0), torch.uint8, low=0, high=128)}
    assert not judged(total, of_ranks, small).different


@pytest.mark.parametrize("options", [{}, {"low": 0, "high": 256}], ids=["inferred", "declared"])
@pytest.mark.parametrize("ignored", [-100, 255])
def test_labels_that_are_ignored_are_drawn(options, ignored):
    """The mean of means is another mean where ranks ignore different numbers of labels."""

    def loss(x, t):
        return F.cross_entropy(x, t, ignore_index=ignored)

    def mean_of_means(x, t):
        mean = loss(x, t)
        dist.all_reduce(mean)
        return mean / 2

    inputs = {"x": gg.Input((8, 19), Shard(0)), "t": gg.Input((8,), Shard(0), torch.int64, **options)}
    stays_inside = ignored < 0 and bool(options)  # a stated range has no -100
    assert judged(loss, mean_of_means, inputs).different is not stays_inside


def test_a_sequential_program_that_raises_is_given_numbers_for_which_it_does_not():
    inputs = {"i": gg.Input((6,), dtype=torch.int64, low=-50, high=50), "table": gg.Input((4, 3))}
    found = judged(lambda i, table: F.embedding(i, table), lambda i, table: F.embedding(i, table) * 2, inputs)
    assert found.different and found.skipped is None


# ---------------------------------------------------------------------- rounding, overflow, and order decide nothing
BOTH = {"x": gg.Input((8,)), "y": gg.Input((8,)), "i": gg.Input((8,), dtype=torch.int64, low=0, high=50)}
EQUAL = {
    "variance": (lambda x, y, i: (x + 1e6).var(correction=0), lambda x, y, i: ((x + 1e6) ** 2).mean() - (x + 1e6).mean() ** 2),
    "floor": (lambda x, y, i: torch.floor(i.float()), lambda x, y, i: torch.floor(i.float() / 49 * 49)),
    "floor of a number": (lambda x, y, i: i.float(), lambda x, y, i: torch.floor(i.float() / 49 * 49)),
    "cast": (lambda x, y, i: i * 1, lambda x, y, i: (i.double() / 49 * 49).long()),
    "equal": (lambda x, y, i: torch.ones(8), lambda x, y, i: (i.double() / 49 * 49 == i).float()),
    "order of a sum": (lambda x, y, i: (x + y + y >= x + y + y) * 1.0, lambda x, y, i: ((x + y) + y >= x + (y + y)) * 1.0),
    "softmax": (lambda x, y, i: (x * 1e3).softmax(0), lambda x, y, i: (x * 1e3).exp() / (x * 1e3).exp().sum()),
    "logsumexp": (lambda x, y, i: (x * 1e3).logsumexp(0), lambda x, y, i: (x * 1e3).exp().sum().log()),
    "next to one": (lambda x, y, i: y * 1, lambda x, y, i: y * (1 + (x * 1e3).erf()) / (1 + (x * 1e3).erf())),
    "unstable order": (lambda x, y, i: y[x.round().topk(3).indices], lambda x, y, i: y[7 - x.round().flip(0).topk(3).indices]),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_equal_over_the_reals_is_verified(name):
    assert verdict(*EQUAL[name], BOTH) == ("unproven" if name == "unstable order" else "verified")


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_equal_over_the_reals_is_not_refuted_without_a_proof(name):
    found = judged(*EQUAL[name], BOTH)
    assert not found.different and found.skipped is None


@pytest.mark.parametrize(
    ("sequential", "distributed"),
    [
        (lambda x, y, i: i.float() / 49, lambda x, y, i: torch.floor(i.float() / 49)),
        (lambda x, y, i: x * 1, lambda x, y, i: x.round()),
        (lambda x, y, i: i * 1, lambda x, y, i: (i.float() / 2).long() * 2),
        (lambda x, y, i: i * 1, lambda x, y, i: (i + x).long()),
        (lambda x, y, i: torch.ones(8), lambda x, y, i: (i.float() / 2 == i).float()),
        (lambda x, y, i: (x <= y).float(), lambda x, y, i: (x < y + 1).float()),
    ],
)
def test_only_whole_numbers_are_left_alone_by_rounding_to_whole_ones(sequential, distributed):
    assert verdict(sequential, distributed, BOTH) == "refuted"


@pytest.mark.parametrize(
    "distributed",
    [
        lambda x, y, i: ((x + 1e6) ** 2).mean() - (x + 1e6).mean() ** 2 + 1,
        lambda x, y, i: (x + 1e6).var(correction=1),
    ],
)
def test_a_difference_beyond_rounding_is_refuted(distributed):
    assert verdict(EQUAL["variance"][0], distributed, BOTH) == "refuted"


@pytest.mark.parametrize(
    ("name", "distributed"),
    [
        ("floor", lambda x, y, i: torch.floor(i.float() / 49 * 49) + 2),
        ("cast", lambda x, y, i: (i.double() / 49 * 49).long() - (i == 0).long()),
        ("equal", lambda x, y, i: (i.double() / 49 * 49 == i + 1).float()),
        ("softmax", lambda x, y, i: (x * 1e3).exp() / (x * 1e3).exp().sum() * 2),
        ("logsumexp", lambda x, y, i: (x * 1e3).exp().mean().log()),
        ("unstable order", lambda x, y, i: y[(-x.round()).topk(3).indices]),
    ],
)
def test_a_wrong_program_does_not_hide_behind_rounding(name, distributed):
    assert verdict(EQUAL[name][0], distributed, BOTH) == "refuted"


def test_a_division_by_zero_is_no_overflow():
    big = {"x": gg.Input((8,)), "y": gg.Input((8,))}
    assert judged(lambda x, y: y * 1, lambda x, y: y + 0 * (y / x) + 0 * (x * 5).exp(), big).different


# ---------------------------------------------------------------------- programs that change from run to run
@torch.library.custom_op("gg_oracle::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() + np.random.rand(*x.shape).astype(x.numpy().dtype))  # a body that cannot be recorded


@noisy.register_fake
def _(x):
    return torch.empty_like(x)


def test_an_operator_that_changes_from_run_to_run_is_an_error():
    inputs = {"x": gg.Input((4, 6))}
    with pytest.raises(gg.GraphGuardError) as caught:
        judged(lambda x: noisy(x), lambda x: noisy(x), inputs)
    assert str(caught.value).startswith("gg_oracle.noisy at ") and str(caught.value).endswith(
        " gives other numbers when it is run again on equal operands; nothing can be said of a program that changes from run "
        "to run, so make the operator a function of its operands"
    )
    with pytest.raises(gg.GraphGuardError, match="gives other numbers"):
        judged(lambda x: x, lambda x: noisy(x), inputs)  # on the ranks alone


# ---------------------------------------------------------------------- a proof is not looked at, a difference is sought
def test_without_trials_what_is_not_proved_is_still_executed():
    inputs = {"x": gg.Input((4, 6), Shard(0))}
    assert verdict(lambda x: x * 1, lambda x: x * 2, inputs, trials=0) == "refuted"
    assert verdict(lambda x: x * 1, lambda x: x * 1, inputs, trials=0, outputs={"out": Replicate()}) == "refuted"
    assert verdict(lambda x: x.sum(0), lambda x: x.sum(0), inputs, trials=0, outputs={"out": Partial()}) == "verified"
