"""Programs that once were proved, or might be, and must not be: each differs from the sequential one for some input."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import graphguard as gg
from graphguard import Replicate, Shard
from graphguard.engine.algebra.function import EVEN, ODD


def double(x):
    return x * 2


def unequal_shares(x):
    return x * 2 * (dist.get_rank() + 1) / 3


def ones(x):
    return torch.ones(4)


def over_itself_where_it_vanishes(x):
    e = torch.exp(torch.log((x > 0).float()).sum(-1))
    return e / e


def over_itself(x):
    return (x / x)[:, 0]


def same(x):
    return x


def root_squared(x):
    return torch.sqrt(x) * torch.sqrt(x)


def root_of_square(x):
    return torch.sqrt(x * x)


def log_of_square(x):
    return torch.log(x * x)


def twice_the_log(x):
    return 2 * torch.log(x)


def square_of_root(x):
    return torch.sqrt(x) ** 2


def power_of_root(x):
    return torch.rsqrt(x) ** -2


def in_zeros(x):
    return torch.zeros(8, 3).slice_scatter(x, end=4)


def log_of_padded_exp(x):
    return torch.log(in_zeros(torch.exp(x)))


def log_of_padded_sigmoid(x):
    return torch.log(in_zeros(torch.sigmoid(x)))


def padded_log_of_sigmoid(x):
    return in_zeros(torch.log(torch.sigmoid(x)))


def products_of_halves(x):
    return x[0:2] * x[2:4].sum(0) + x[0:2].sum(0) * x[2:4]


def one_product_of_halves(x):
    return 2 * x[0:2] * x[2:4].sum(0)


# What no number shows: a logarithm of 0.
NOT_SEEN = (in_zeros, padded_log_of_sigmoid)


@pytest.mark.parametrize(
    ("sequential", "distributed"),
    [
        (same, square_of_root),  # the root is not defined everywhere
        (same, power_of_root),
        (log_of_padded_exp, in_zeros),  # log 0 is not 0
        (log_of_padded_sigmoid, padded_log_of_sigmoid),
        (products_of_halves, one_product_of_halves),  # equal atoms were compared in another order than they matched in
        (one_product_of_halves, products_of_halves),
        (double, unequal_shares),
        (ones, over_itself_where_it_vanishes),
        (ones, over_itself),
        (same, root_squared),
        (same, root_of_square),
        (log_of_square, twice_the_log),
    ],
)
def test_it_is_not_proved(sequential, distributed):
    report = gg.verify(sequential, distributed, mesh={"tp": 2}, inputs={"x": gg.Input((4, 3))})
    assert report.verdict == ("unproven" if distributed in NOT_SEEN else "refuted")


IDS = {"x": gg.Input((4,), dtype=torch.int64, low=0, high=9)}


def large(x):
    return (x > 3).to(torch.int64) * 2


def sum_of_booleans(x):
    mask = x > 3
    dist.all_reduce(mask)
    return mask.to(torch.int64)


def average_of_whole_numbers(x):
    y = x.clone() * (dist.get_rank() == 0)
    dist.all_reduce(y, op=dist.ReduceOp.AVG)
    return y * 2


@pytest.mark.parametrize(("sequential", "distributed"), [(large, sum_of_booleans), (same, average_of_whole_numbers)])
def test_collectives_of_whole_numbers_are_not_real_arithmetic(sequential, distributed):
    report = gg.verify(sequential, distributed, mesh={"tp": 2}, inputs=IDS)
    assert report.verdict == "refuted"


def test_a_partial_tensor_that_claims_to_be_replicated():
    def product(x, w):
        return x @ w

    def claimed(x, w, mesh):
        return DTensor.from_local(x @ w, mesh, [Replicate()], run_check=False)

    inputs = {"x": gg.Input((4, 8), Shard(1)), "w": gg.Input((8, 4), Shard(0))}
    assert gg.verify(product, claimed, mesh={"tp": 2}, inputs=inputs).verdict == "refuted"


def test_nothing_to_verify_is_an_error():
    text = "the sequential program returns no tensor, so there is nothing to verify; return what the ranks should match"
    with pytest.raises(gg.UsageError, match=re.escape(text)):
        gg.verify(lambda x: None, lambda x: None, mesh={"tp": 2}, inputs=IDS)


# ---------------------------------------------------------------------- masks, shifts and orders that are almost right
INF = float("inf")
SCORES = {"s": gg.Input((8, 8)), "v": gg.Input((8, 3))}


def above_diagonal(rows, columns):
    return torch.ones(rows, columns, dtype=torch.bool).triu(1)


def causal(s, v):
    return s.masked_fill(above_diagonal(8, 8), -INF).softmax(-1)[:4] @ v


def cut_before_its_last_key(s, v):
    s = s[:4, :3].masked_fill(above_diagonal(4, 3), -INF)
    p = (s - s.amax(-1, keepdim=True)).exp()
    return (p @ v[:3]) / p.sum(-1, keepdim=True)


def rows_without_a_key(s, v):
    s = s[:4, 4:].masked_fill(torch.ones(4, 4, dtype=torch.bool).tril(), -INF)
    p = (s - s.amax(-1, keepdim=True)).exp()  # the last row has none left: nan
    return (p @ v[4:]) / p.sum(-1, keepdim=True)


def later_keys(s, v):
    p = s[:4, 4:].masked_fill(torch.ones(4, 4, dtype=torch.bool).tril(), -INF).exp()
    return (p @ v[4:]) / p.sum(-1, keepdim=True)


def seen_from_row_two(s, v):
    return s.masked_fill(above_diagonal(8, 8), -INF).softmax(-1)[2:6] @ v


def blocks_of_keys(s, v):
    """Rows 2 to 5 over keys 0 to 3 and 4 to 7: rows 2 and 3 see none of the second block, so that its mean is nan there."""
    parts = s.masked_fill(above_diagonal(8, 8), -INF)[2:6].chunk(2, -1)
    logs = [part.logsumexp(-1, keepdim=True) for part in parts]
    means = [(part - log).exp() @ values for part, log, values in zip(parts, logs, v.chunk(2), strict=True)]
    return *logs, *means


def merged_by_log_with_rows_of_nothing(s, v):
    a, b, left, right = blocks_of_keys(s, v)
    both = torch.logaddexp(a, b)
    return (a - both).exp() * left + (b - both).exp() * right


def merged_by_sigmoid_with_rows_of_nothing(s, v):
    a, b, left, right = blocks_of_keys(s, v)
    return left - torch.sigmoid(b - a) * (left - right)


def the_other_way_with_rows_of_nothing(s, v):
    a, b, left, right = blocks_of_keys(s, v)
    return right - torch.sigmoid(a - b) * (right - left)


def scores_alone(s, v):
    return s * 1


def times_and_over_rows_of_nothing(s, v):
    rows = s.exp().masked_fill(torch.ones(8, 8, dtype=torch.bool).tril(), 0).sum(-1, keepdim=True)  # the last is 0
    return s * rows / rows


def times_and_over_rows_of_which_the_second_is_nothing(s, v):
    for hidden in (above_diagonal(8, 8), torch.ones(8, 8, dtype=torch.bool).tril()):
        rows = s.exp().masked_fill(hidden, 0).sum(-1, keepdim=True)
        s = s * rows / rows
    return s


def over_one_sum(s, v):
    return s / v.sum()


def times_and_over_another_sum(s, v):
    return s / v.sum() * v[:, 0].sum() / v[:, 0].sum()


def sum_from_its_log(s, v):
    return s * v.sum().log().exp()


def times_and_over_what_has_a_log(s, v):
    return s * v.sum() * v.sum() / v.sum()  # of nothing, where the sequential program has zero


def root_of_one_sum(s, v):
    return s + v.sum().sqrt()


def times_and_over_what_has_a_root(s, v):
    return (s + v.sum().sqrt()) * v.sum() / v.sum()


def log_of_rows_of_nothing_minus_itself(s, v):
    rows = s.exp().masked_fill(torch.ones(8, 8, dtype=torch.bool).tril(), 0).sum(-1, keepdim=True)  # the last is 0
    return s + rows.log() - rows.log()


def over_the_exp_of_a_masked_log(s, v):
    keep = (torch.arange(8) < 4).to(s.dtype)
    return s * keep * (-keep.log()).exp() * keep  # infinity times zero


def nothing(s, v):
    return torch.zeros(8, 8)


def exp_of_infinities_that_cancel(s, v):
    hidden = torch.full((8, 8), -INF)
    return (hidden - s.masked_fill(above_diagonal(8, 8), -INF)).exp()  # minus infinity minus itself


def halves(s, v):
    return torch.cat([s[:4].sum(0).tanh() * v[:, 0], s[4:].sum(0).tanh() * v[:, 0]])


def halves_swapped(s, v):
    return torch.cat([s[4:].sum(0).tanh() * v[:, 0], s[:4].sum(0).tanh() * v[:, 0]])


def infinity_minus_itself(s, v):
    hidden = torch.full((8, 8), -INF)
    return (hidden - hidden.amax(-1, keepdim=True)).exp() * 0  # nan, everywhere


def kept_columns(s, v):
    return s * (torch.arange(8) < 4)


def infinity_times_zero(s, v):
    return s.masked_fill(torch.arange(8) >= 4, -INF) * (torch.arange(8) < 4)  # nan where it is hidden


def infinity_times_the_number_zero(s, v):
    return s.masked_fill(torch.arange(8) >= 4, -INF) * 0


def infinity_in_a_matrix_product(s, v):
    return s.masked_fill(torch.arange(8) >= 4, -INF) @ torch.zeros(8, 8)


def sum_over_chosen(s, v, scattered):
    """The two largest of each row in zeros, with a third position that is 0 for all."""
    values, index = s.topk(2, -1)
    values, index = F.pad(values, (0, 1)), F.pad(index, (0, 1))
    if scattered:
        return torch.ones_like(s).scatter(-1, index, values)  # position 0 may be written twice: the last one stays
    chosen = F.one_hot(index, 8).to(s.dtype)
    return 1 - chosen.sum(1) + (chosen * values[..., None]).sum(1)


def on_the_diagonal(s, v, scattered):
    """The k-th largest of row k: those of different rows may lie at the same position."""
    values, index = (each[:3].diagonal() for each in s.topk(3, -1))
    if scattered:
        return torch.zeros(1, 8).scatter(-1, index.reshape(1, 3), values.reshape(1, 3))
    return (F.one_hot(index, 8).to(s.dtype) * values[:, None]).sum(0, keepdim=True)


@pytest.mark.parametrize(
    ("sequential", "distributed"),
    [
        (nothing, infinity_minus_itself),
        (kept_columns, infinity_times_zero),
        (nothing, infinity_times_the_number_zero),
        (nothing, infinity_in_a_matrix_product),
        (partial(sum_over_chosen, scattered=False), partial(sum_over_chosen, scattered=True)),
        (partial(on_the_diagonal, scattered=False), partial(on_the_diagonal, scattered=True)),
        (causal, cut_before_its_last_key),
        (later_keys, rows_without_a_key),
        (seen_from_row_two, merged_by_log_with_rows_of_nothing),
        (seen_from_row_two, merged_by_sigmoid_with_rows_of_nothing),
        (seen_from_row_two, the_other_way_with_rows_of_nothing),
        (scores_alone, times_and_over_rows_of_nothing),
        (scores_alone, times_and_over_rows_of_which_the_second_is_nothing),
        (scores_alone, log_of_rows_of_nothing_minus_itself),
        (over_one_sum, times_and_over_another_sum),
        (root_of_one_sum, times_and_over_what_has_a_root),
        (sum_from_its_log, times_and_over_what_has_a_log),
        (kept_columns, over_the_exp_of_a_masked_log),
        (nothing, exp_of_infinities_that_cancel),
        (halves, halves_swapped),
    ],
)
def test_masks_and_shifts_that_are_almost_right(sequential, distributed):
    report = gg.verify(sequential, distributed, mesh={"tp": 2}, inputs=SCORES, trials=0)  # no proof is looked at
    assert report.verdict != "verified"


@pytest.mark.parametrize(("widths", "verdict"), [((12, 3), "verified"), ((11, 4), "refuted")])
def test_a_gathered_row_of_pieces_is_cut_where_the_pieces_are(widths, verdict):
    def gathered(w, b):
        row = torch.empty(30)
        dist.all_gather_into_tensor(row, torch.cat([w.reshape(-1), b]))
        first, _ = row.view(2, 15).split(widths, 1)
        return first[:, :11].reshape(22) if verdict == "refuted" else first.reshape(24)

    inputs = {"w": gg.Input((6, 4), Shard(0)), "b": gg.Input((6,), Shard(0))}
    wanted = 22 if verdict == "refuted" else 24
    assert gg.verify(lambda w, b: w.reshape(-1)[:wanted], gathered, mesh={"dp": 2}, inputs=inputs).verdict == verdict


def ring_sum(x, weights):
    rank, size = dist.get_rank(), dist.get_world_size()
    total = weights[0] * x.sum(0)
    for step in range(1, size):
        arriving = torch.empty_like(x)
        messages = [dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, arriving, (rank - 1) % size)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        x = arriving
        total = total + weights[step] * x.sum(0)
    return total


@pytest.mark.parametrize(("weights", "verdict"), [((1, 1, 1), "verified"), ((1, 1, 2), "refuted"), ((2, 1, 0), "refuted")])
def test_a_ring_adds_every_block_once(weights, verdict):
    report = gg.verify(
        lambda x: x.sum(0), lambda x: ring_sum(x, weights), mesh={"cp": 3}, inputs={"x": gg.Input((6, 2), Shard(0))}
    )
    assert report.verdict == verdict


def clamped_where_it_can(t, m):
    """A clamp to [5, 3] is 3 everywhere; the parts below 5 and above 3, taken one by one, say something else."""
    return t * (1 - (t < 5).long() - (t > 3).long()) + 5 * (t < 5) + 3 * (t > 3)


def nought(t, m):
    return torch.zeros(4)


CROSSED = [
    (clamped_where_it_can, lambda t, m: t.clamp(5, 3)),
    (lambda t, m: torch.arange(255, 257), lambda t, m: torch.tensor([255, 0], dtype=torch.uint8)),  # no run: it wraps
    (nought, lambda t, m: torch.relu(m.float()).log() * 0),  # log 0 times 0
    (nought, lambda t, m: torch.tanh(m.float() * t).log() * 0),
]


@pytest.mark.parametrize(("sequential", "distributed"), CROSSED)
def test_ends_that_cross_wrap_or_are_no_numbers(sequential, distributed):
    inputs = {"t": gg.Input((4,), dtype=torch.int64, low=0, high=8), "m": gg.Input((4,), dtype=torch.bool)}
    report = gg.verify(sequential, distributed, mesh={"tp": 1}, inputs=inputs, trials=0)  # no proof is looked at
    assert report.verdict == "refuted"
    assert gg.verify(lambda t, m: t * 0 + 3, lambda t, m: t.clamp(5, 3), mesh={"tp": 1}, inputs=inputs).verified


@pytest.mark.parametrize("name", sorted(ODD | EVEN))
def test_functions_are_as_odd_or_even_as_torch_has_them(name):
    function = getattr(torch, name)
    x = torch.linspace(-0.95, 0.95, 40, dtype=torch.float64)
    torch.testing.assert_close(function(-x), function(x) * (1 if name in EVEN else -1))


def weights_and_totals(x, y):
    own, before = x.exp().sum(-1), y.exp().sum()
    return own, before, before + own.sum()


def by_partial_fractions(x, y, g):
    _, before, after = weights_and_totals(x, y)
    return g.sum() / before - g.sum() / after


def weighed_one_by_one(x, y, g):
    """Each weight meets its own g: their sum is not the share times the sum of all g."""
    own, before, after = weights_and_totals(x, y)
    return (own * g).sum() / before / after


def weighed_together(x, y, g):
    own, before, after = weights_and_totals(x, y)
    return g.sum() * own.sum() / before / after


@pytest.mark.parametrize(("distributed", "verdict"), [(weighed_one_by_one, "refuted"), (weighed_together, "verified")])
def test_a_share_is_of_a_whole_sum(distributed, verdict):
    inputs = {"x": gg.Input((3, 4)), "y": gg.Input((5,)), "g": gg.Input((3,))}
    assert gg.verify(by_partial_fractions, distributed, mesh={"tp": 1}, inputs=inputs, trials=0).verdict == verdict
