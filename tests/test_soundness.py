"""Programs that once were proved, or might be, and must not be: each differs from the sequential one for some input."""

import pytest
import torch
import torch.distributed as dist

import graphguard as gg


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


@pytest.mark.parametrize(
    ("sequential", "distributed"),
    [
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
    assert report.verdict != "verified"
