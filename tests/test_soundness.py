"""Programs that once were proved, or might be, and must not be: each differs from the sequential one for some input."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import graphguard as gg
from graphguard import Replicate, Shard


def double(x):
    return x * 2


def unequal_shares(x):
    return x * 2 * (dist.get_rank() + 1) / 3


def all_on_one_rank(x):
    return x * 2 * (1.0 if dist.get_rank() == 0 else 0.0)


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


# What no number shows: a quotient that is not defined at 0, a logarithm of 0, a sum that one rank has alone.
NOT_SEEN = (over_itself, in_zeros, padded_log_of_sigmoid, all_on_one_rank)


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
        (double, all_on_one_rank),
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
