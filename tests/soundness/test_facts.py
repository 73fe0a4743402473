"""What the sequential program shows of some elements says nothing of the others."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

ROWS, FEW, MANY, WIDTH = 4, 4, 8, 3
LONG = torch.int64


def check(sequential, distributed, inputs, trials=None, mesh=None):
    return gg.verify(sequential, distributed, mesh=mesh or {"tp": 2}, inputs=inputs, trials=trials)


def ranges(report):
    return [text for text in report.assumptions if "<=" in text or " = " in text]


# ---------------------------------------------------------------------- ranges
def by_embedding(ids, table):
    return F.embedding(ids, table)


def by_index(ids, table):
    return table[ids]


def by_select(ids, table):
    return torch.index_select(table, 0, ids.reshape(-1))


def by_gather(ids, table):
    return torch.gather(table, 0, ids.reshape(-1, 1).expand(-1, WIDTH))


def by_row(ids, table):
    return torch.take_along_dim(table, ids.reshape(-1, 1), 0)


READS = [by_embedding, by_index, by_select, by_gather, by_row]


@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
@pytest.mark.parametrize("declared", [{}, {"low": 0, "high": MANY}], ids=["inferred", "declared"])
def test_the_range_of_a_column_is_not_that_of_another(read, declared):
    def sequential(ids, a, b):
        return read(ids[:, 0], a), read(ids[:, 1], b)

    inputs = {"ids": gg.Input((5, 2), dtype=LONG, **declared), "a": gg.Input((FEW, WIDTH)), "b": gg.Input((MANY, WIDTH))}
    first_rows = {**inputs, "b": gg.Input((MANY, WIDTH), local=lambda full, coord: full[:FEW])}
    assert check(sequential, sequential, first_rows).verdict == "refuted"
    report = check(sequential, sequential, inputs)
    assert report.verified
    if not declared and read is not by_row:  # which takes positions as they are modulo the size
        assert ranges(report) == [f"0 <= ids[:, 0] < {FEW}", f"0 <= ids[:, 1] < {MANY}"]


def test_a_declared_range_stays_and_the_elements_that_index_are_told():
    def sequential(w, i):
        return w[i[:2]], i[2:] * 1

    def clamped(w, i):
        return w[i[:2].clamp(max=FEW - 1)], i[2:].clamp(max=FEW - 1)

    def clamped_where_it_indexes(w, i):
        return w[i[:2].clamp(max=FEW - 1)], i[2:] * 1

    inputs = {"w": gg.Input((FEW, WIDTH)), "i": gg.Input((4,), dtype=LONG, low=0, high=10)}
    assert check(sequential, clamped, inputs).verdict == "refuted"
    report = check(sequential, sequential, inputs)
    assert report.verified and ranges(report) == ["0 <= i < 10", f"0 <= i[:2] < {FEW}"]
    assert check(sequential, clamped_where_it_indexes, inputs).verdict != "refuted"


def test_an_input_that_indexes_as_a_whole_has_its_range_as_a_whole():
    inputs = {"ids": gg.Input((4, 3), dtype=LONG), "table": gg.Input((MANY, WIDTH))}

    def in_two_parts(ids, table):
        return torch.cat([F.embedding(ids[:2], table), F.embedding(ids[2:], table)])

    def masked(ids, table):
        start = dist.get_rank() * (MANY // 2)
        foreign = (ids < start) | (ids >= start + MANY // 2)
        found = F.embedding((ids - start).masked_fill(foreign, 0), table).masked_fill(foreign[..., None], 0.0)
        dist.all_reduce(found)
        return found

    shards = {**inputs, "table": gg.Input((MANY, WIDTH), Shard(0))}
    report = check(by_embedding, masked, shards)
    assert report.verified and ranges(report) == [f"0 <= ids < {MANY}"]
    assert check(in_two_parts, masked, shards).verified


def test_a_half_that_does_not_index_may_be_anything():
    """Whether it lies in the table, which the first half has to."""

    def sequential(ids, table):
        return F.embedding(ids[:2], table), (ids[2:] < FEW).float()

    def distributed(ids, table):
        return F.embedding(ids[:2], table), torch.ones(2)

    inputs = {"ids": gg.Input((4,), dtype=LONG), "table": gg.Input((FEW, WIDTH))}
    assert check(sequential, distributed, inputs).verdict == "refuted"
    below = {**inputs, "ids": gg.Input((4,), dtype=LONG, low=0, high=FEW)}
    assert check(sequential, distributed, below).verified


def test_every_other_element_indexes():
    def sequential(ids, table):
        return F.embedding(ids[::2], table), ids[1::2] * 1

    def clamped(ids, table):
        return F.embedding(ids[::2], table), ids[1::2].clamp(0, MANY - 1)

    inputs = {"ids": gg.Input((6,), dtype=LONG), "table": gg.Input((MANY, WIDTH))}
    assert check(sequential, clamped, inputs).verdict == "refuted"
    report = check(sequential, sequential, inputs)
    assert report.verified and ranges(report) == [f"0 <= ids[::2] < {MANY}"]


def test_what_one_rank_holds_indexes_and_what_the_other_holds_does_not():
    """Shards of an input: the first half is known to lie in the table."""

    def sequential(ids, table):
        return F.embedding(ids[:2], table).sum(0), ids * 1

    def distributed(ids, table):
        found = F.embedding(ids.clamp(0, MANY - 1), table).sum(0) * (dist.get_rank() == 0)
        dist.all_reduce(found)
        return found, ids.clamp(0, MANY - 1)

    inputs = {"ids": gg.Input((4,), Shard(0), LONG), "table": gg.Input((MANY, WIDTH))}
    assert check(sequential, distributed, inputs).verdict == "refuted"


# ---------------------------------------------------------------------- labels
def mean_of_means(loss):
    def distributed(x, t):
        found = loss(x, t)
        dist.all_reduce(found, op=dist.ReduceOp.AVG)
        return found

    return distributed


def counted(ignored):
    def distributed(x, t):
        total, count = F.cross_entropy(x, t, ignore_index=ignored, reduction="sum"), (t != ignored).sum()
        dist.all_reduce(total)
        dist.all_reduce(count)
        return total / count

    return distributed


def labels(**declared):
    return {"x": gg.Input((8, 5), Shard(0)), "t": gg.Input((8,), Shard(0), LONG, **declared)}


@pytest.mark.parametrize("ignored", [-100, 255, -1, 2])
def test_the_mean_of_means_is_not_the_mean_where_labels_may_be_ignored(ignored):
    def loss(x, t):
        return F.cross_entropy(x, t, ignore_index=ignored)

    report = check(loss, mean_of_means(loss), labels())
    assert report.verdict == "refuted"
    told = "0 <= t < 5" if 0 <= ignored < 5 else "-1 <= t < 5" if ignored == -1 else f"0 <= t < 5 or t = {ignored}"
    assert ranges(report) == [told]
    assert check(loss, counted(ignored), labels()).verified


def test_the_mean_of_means_is_the_mean_where_no_label_is_ignored():
    def loss(x, t):
        return F.cross_entropy(x, t)

    report = check(loss, mean_of_means(loss), labels(low=0, high=5))
    assert report.verified and ranges(report) == ["0 <= t < 5"]
    assert check(loss, mean_of_means(loss), labels(low=-100, high=5)).verdict == "refuted"


def test_labels_of_a_picture():
    def loss(x, t):
        return F.cross_entropy(x, t, ignore_index=255)

    def inputs(**declared):
        return {"x": gg.Input((4, 3, 2, 2), Shard(0)), "t": gg.Input((4, 2, 2), Shard(0), LONG, **declared)}

    assert check(loss, mean_of_means(loss), inputs()).verdict == "refuted"
    assert check(loss, mean_of_means(loss), inputs(low=0, high=256)).verdict == "refuted"
    assert check(loss, mean_of_means(loss), inputs(low=0, high=3)).verified


def test_a_log_likelihood_of_ignored_labels():
    def loss(x, t):
        return F.nll_loss(x.log_softmax(-1), t)

    assert check(loss, mean_of_means(loss), labels()).verdict == "refuted"
    assert check(loss, mean_of_means(loss), labels(low=0, high=5)).verified


def test_a_loss_over_a_sharded_vocabulary_knows_nothing_of_ignored_labels():
    """Megatron's: a label that no rank has counts as the sum of all exponentials."""

    def sequential(x, t):
        return F.cross_entropy(x, t, reduction="none")

    def distributed(x, t):
        largest = x.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        x = x - largest[:, None]
        start = dist.get_rank() * x.shape[1]
        foreign = (t < start) | (t >= start + x.shape[1])
        own = x.gather(1, (t - start).masked_fill(foreign, 0)[:, None])[:, 0].masked_fill(foreign, 0.0)
        total = x.exp().sum(-1)
        dist.all_reduce(own)
        dist.all_reduce(total)
        return total.log() - own

    def inputs(**declared):
        return {"x": gg.Input((6, 8), Shard(1)), "t": gg.Input((6,), dtype=LONG, **declared)}

    assert check(sequential, distributed, inputs(low=-100, high=8)).verdict == "refuted"
    assert check(sequential, distributed, inputs(low=0, high=8)).verified
    nothing_stated = check(sequential, distributed, inputs())
    assert nothing_stated.verified and "0 <= t < 8" in nothing_stated.assumptions


def test_ranks_may_not_take_a_number_for_a_class_that_the_sequential_program_never_did():
    """-50 is in the declared range; the sequential program masks it away before the loss, the ranks do not."""

    def sequential(x, t):
        return F.cross_entropy(x, t.clamp(min=0), reduction="none")

    def distributed(x, t):
        return F.cross_entropy(x, t, reduction="none")

    inputs = {"x": gg.Input((6, 5)), "t": gg.Input((6,), dtype=LONG, low=-100, high=5)}
    assert check(sequential, distributed, inputs).verdict == "refuted"


# ---------------------------------------------------------------------- definedness
X = {"x": gg.Input((ROWS, WIDTH))}


def root(x):
    return x.sqrt()


def square_of_root(x):
    return x.sqrt() ** 2


def product_of_roots(x):
    return x.sqrt() * x.sqrt()


@pytest.mark.parametrize("same", [square_of_root, product_of_roots], ids=lambda same: same.__name__)
@pytest.mark.parametrize(
    ("here", "there"),
    [((slice(0, 2),), (slice(2, 4),)), ((slice(None), 0), (slice(None), slice(1, 3))), ((slice(0, 4, 2),), (slice(1, 4, 2),))],
    ids=["rows", "a column", "every other row"],
)
def test_a_root_of_some_elements_says_nothing_of_the_others(same, here, there):
    def sequential(x):
        return root(x[here]), x[there] * 1

    def elsewhere(x):
        return root(x[here]), same(x[there])

    def at_the_same_place(x):
        return root(x[here]), same(x[here])

    assert check(sequential, elsewhere, X).verdict == "refuted"
    assert check(lambda x: (root(x[here]), x[here] * 1), at_the_same_place, X, trials=0).verified


def test_a_root_that_is_cut_off_afterwards_says_nothing():
    def sequential(x):
        return x.sqrt()[:2], x[2:] * 1

    def distributed(x):
        return x[:2].sqrt(), x[2:].sqrt() ** 2

    assert check(sequential, distributed, X).verdict == "refuted"


def test_a_root_in_parts_is_one_of_all():
    def sequential(x):
        s = x.sqrt()
        return s[:2] + 1, s[2:] * 2, x * 1

    def distributed(x):
        return x[:2].sqrt() + 1, x[2:].sqrt() * 2, x.sqrt() ** 2

    assert check(sequential, distributed, X, trials=0).verified


def test_a_root_behind_a_mask_says_nothing():
    def guarded(x):
        return torch.where(x > 0, x.sqrt(), 0.0)

    assert check(lambda x: (guarded(x), x * 1), lambda x: (guarded(x), x.sqrt() ** 2), X).verdict == "refuted"
    assert check(guarded, guarded, X).verified


def test_a_root_that_nothing_uses_says_nothing():
    def sequential(x):
        x.sqrt()
        return x * 1

    assert check(sequential, square_of_root, X).verdict == "refuted"


def test_the_root_of_a_sum_of_some_rows():
    def sequential(x):
        return x.sum(-1)[:2].sqrt(), x.sum(-1)[2:] * 1

    def distributed(x):
        return x.sum(-1)[:2].sqrt(), x.sum(-1)[2:].sqrt() ** 2

    assert check(sequential, distributed, X).verdict == "refuted"


def test_a_shard_knows_the_roots_of_its_own_rows():
    """The sequential program takes the roots of the first half, which is what rank 0 holds."""

    def sequential(x):
        return x[:2].sqrt(), x * 1

    def distributed(x):
        return x.sqrt() * (dist.get_rank() == 0), x.sqrt() ** 2

    assert check(sequential, distributed, {"x": gg.Input((ROWS, WIDTH), Shard(0))}).verdict != "verified"
    assert check(lambda x: (x.sqrt(), x * 1), lambda x: (x.sqrt(), x.sqrt() ** 2),
                 {"x": gg.Input((ROWS, WIDTH), Shard(0))}, trials=0).verified  # fmt: skip


PRESUMED = "it is taken to be defined"


def is_unconditional(report):
    presumed = [text for text in report.assumptions if PRESUMED in text]
    return report.verified and not presumed and not getattr(report, "conditions", ())


@pytest.mark.parametrize(
    ("shown", "used"),
    [
        (lambda x: x[:2].log(), lambda x: x[2:].log().exp()),
        (lambda x: (x[:2] * x[2:]).log(), lambda x: x[2:].log().exp()),
        (lambda x: (x[:2] + x[2:]).log(), lambda x: x[2:].log().exp()),
        (lambda x: 1 / x[2:], lambda x: x[2:].log().exp()),
        (lambda x: torch.where(x[2:] > 0, x[2:].log(), 0.0), lambda x: x[2:].log().exp()),
        (lambda x: x.log()[:2], lambda x: x[2:].log().exp()),
    ],
    ids=["of other rows", "of a product", "of a sum", "division", "behind a mask", "cut off"],
)
def test_a_log_is_not_shown_to_be_defined_by(shown, used):
    report = check(lambda x: (shown(x), x[2:] * 1), lambda x: (shown(x), used(x)), X, trials=0)
    assert not is_unconditional(report)


def test_a_log_at_the_same_places_is_defined():
    assert is_unconditional(check(lambda x: (x.log(), x * 1), lambda x: (x.log(), x.log().exp()), X, trials=0))
    both = check(lambda x: (x * x[0]).log(), lambda x: (x[0] * x).log(), X, trials=0)
    assert is_unconditional(both)


def test_a_count_that_is_divided_by_behind_a_mask_may_be_zero():
    """(loss · count) / count is the loss only where something is counted."""

    def guarded(x, m):
        count = m.sum()
        return torch.where(count > 0, (x * m).sum() / count, 0.0), x.sum()

    def plain(x, m):
        return (x * m).sum() / m.sum(), x.sum()

    def cancelling(first):
        def distributed(x, m):
            return first(x, m)[0], x.sum() * m.sum() / m.sum()

        return distributed

    inputs = {"x": gg.Input((ROWS,)), "m": gg.Input((ROWS,))}
    assert is_unconditional(check(plain, cancelling(plain), inputs, trials=0))
    assert not is_unconditional(check(guarded, cancelling(guarded), inputs, trials=0))


def own_loss(x, t):
    """As of a split vocabulary: it knows of no label that is ignored."""
    return (x.logsumexp(-1) - (x * F.one_hot(t, 7)).sum(-1)).mean()


def test_where_the_ranks_have_a_loss_of_their_own_no_label_is_ignored_by_default():
    inputs = {"x": gg.Input((4, 7)), "t": gg.Input((4,), dtype=torch.int64)}
    report = gg.verify(lambda x, t: F.cross_entropy(x, t), own_loss, mesh=2, inputs=inputs)
    assert report.verdict == "verified" and "0 <= t < 7" in report.assumptions
    said = gg.verify(lambda x, t: F.cross_entropy(x, t, ignore_index=3), own_loss, mesh=2, inputs=inputs)
    assert said.verdict == "refuted"
