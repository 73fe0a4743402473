"""Programs that would be verified along paths by a tool that is less careful, beside ones that are right."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Partial, Replicate, Shard

ROWS = {"x": gg.Input((8, 4), Shard(0)), "w": gg.Input((4, 4))}
WHOLE = {"x": gg.Input((8, 4)), "w": gg.Input((4, 4), Shard(1))}


def verdict(sequential, distributed, inputs=ROWS, out=None, **options):
    outputs = {"out": Shard(0) if out is None else out}
    return gg.verify(sequential, distributed, mesh={"dp": 2}, inputs=inputs, outputs=outputs, paths=3, **options)


# ---------------------------------------------------------------------- decisions that are others
def above(limit):
    def program(x, w):
        rows = (x.sum(-1) > limit).nonzero().flatten()
        return torch.zeros_like(x).index_add(0, rows, x[rows] @ w)

    return program


def test_another_limit_that_the_samples_do_not_tell_apart_is_not_verified():
    """Whole numbers that are equal on every sample are still to be proved equal."""
    assert verdict(above(0.0), above(0.0)).verified
    assert not verdict(above(0.0), above(1e-9)).verified


def by_first_column(x, w):
    rows = (x[:, 0] + x[:, 1] + x[:, 2] + x[:, 3] > 0).nonzero().flatten()
    return torch.zeros_like(x).index_add(0, rows, x[rows] @ w)


def by_its_square(x, w):
    total = x.sum(-1)
    rows = (total * total.abs() > 0).nonzero().flatten()
    return torch.zeros_like(x).index_add(0, rows, x[rows] @ w)


def test_the_same_decision_made_in_another_way_is_verified_or_left_open():
    assert verdict(above(0.0), by_first_column).verdict in ("verified", "unproven")
    assert verdict(above(0.0), by_its_square).verdict == "unproven"


# ---------------------------------------------------------------------- decisions that depend on each other
def twice(x, w):
    kept = x[x.sum(-1) > 0]
    best = (kept @ w).sum(-1).argmax() if kept.size(0) else torch.tensor(0)
    return kept[int(best)] if kept.size(0) else x[0]


def twice_with_columns(total):
    def program(x, w):
        kept = x[x.sum(-1) > 0]
        if not kept.size(0):
            return x[0]
        score = (kept @ w).sum(-1)
        if total:
            dist.all_reduce(score)
        return kept[int(score.argmax())]

    return program


@pytest.mark.parametrize("total", [True, False])
def test_a_decision_that_depends_on_another_one(total):
    report = verdict(twice, twice_with_columns(total), WHOLE, Replicate())
    assert report.verified is total
    if total:
        assert {choice.text.split()[0] for choice in report.decisions} == {"gt", "argmax"}


# ---------------------------------------------------------------------- what is received
def picked(x, w):
    rows = (x.sum(-1) > 0).nonzero().flatten()
    return x[rows] @ w


def told_by_the_first(fault):
    """The first rank decides, and tells the others."""

    def program(x, w):
        mask = (x.sum(-1) > 0).to(torch.int64)
        if dist.get_rank() != 0:
            mask = torch.zeros_like(mask)
        dist.broadcast(mask, 0)
        if fault and dist.get_rank() == 1:
            mask = 1 - mask
        return x[mask.bool()] @ w

    return program


def test_whole_numbers_that_a_rank_is_told():
    assert verdict(picked, told_by_the_first(False), WHOLE, Shard(1)).verified
    assert verdict(picked, told_by_the_first(True), WHOLE, Shard(1)).verdict == "refuted"


def counted(x, w):
    count = int((x.sum(-1) > 0).sum())
    return (x @ w) * count


def counted_together(all_of_them):
    def program(x, w):
        count = (x.sum(-1) > 0).sum()
        if all_of_them:
            dist.all_reduce(count)
        return (x @ w) * int(count)

    return program


@pytest.mark.parametrize("all_of_them", [True, False])
def test_counts_that_are_summed_over_ranks(all_of_them):
    assert verdict(counted, counted_together(all_of_them)).verdict == ("verified" if all_of_them else "refuted")


def summand(x, k, w):
    return (x @ w) * int(k.sum())


def test_a_summand_of_whole_numbers_says_nothing():
    inputs = {**ROWS, "k": gg.Input((2,), Partial(), torch.int64, low=0, high=3)}
    assert not verdict(summand, summand, inputs).verified


# ---------------------------------------------------------------------- repeated decisions
def in_microbatches(x, w):
    return torch.cat([above(0.0)(part, w) for part in x.chunk(2)])


def test_microbatches_repeat_a_decision():
    assert verdict(above(0.0), in_microbatches).verified


def recomputed(x, w):
    x.requires_grad_()
    y = torch.utils.checkpoint.checkpoint(above(0.0), x, w, use_reentrant=False)
    return torch.autograd.grad(y.sum(), x)[0]


def once(x, w):
    x.requires_grad_()
    return torch.autograd.grad(above(0.0)(x, w).sum(), x)[0]


def test_recomputation_repeats_a_decision():
    assert verdict(once, recomputed).verified


# ---------------------------------------------------------------------- a sequential program that reads nothing
def dense(x, w):
    return torch.where((x.sum(-1) > 0).unsqueeze(-1), x @ w, torch.zeros_like(x))


def test_ranks_read_what_the_sequential_program_only_computes():
    report = verdict(dense, above(0.0))
    assert report.verified and report.paths == 3
    assert not verdict(dense, above(0.5)).verified


# ---------------------------------------------------------------------- rows that are joined dims
def joined_rows(limit=0.0):
    """A sequence and a batch as rows, of which each rank has parts of both."""

    def program(x, w):
        rows = x.flatten(0, 1)
        best = (rows @ w).topk(1, -1).indices.flatten()
        y = torch.zeros_like(rows)
        for column in range(w.size(1)):
            mine = (best == column).nonzero().flatten()
            y = y.index_add(0, mine, (rows[mine] - limit) * (column + 1))
        return y.view_as(x)

    return program


@pytest.mark.parametrize("limit, verdict", [(0.0, "verified"), (1.0, "refuted")])
def test_ranks_have_parts_of_both_dims_that_rows_are_made_of(limit, verdict):
    placed = {"dp": Shard(1), "sp": Shard(0)}
    inputs = {"x": gg.Input((4, 2, 3), placed), "w": gg.Input((3, 3))}
    options = {"mesh": {"dp": 2, "sp": 2}, "inputs": inputs, "outputs": {"out": placed}, "paths": 3}
    assert gg.verify(joined_rows(), joined_rows(limit), **options).verdict == verdict


# ---------------------------------------------------------------------- capacity
def with_capacity(most):
    def program(x, w):
        chosen = (x @ w).argmax(-1)
        out = torch.zeros_like(x)
        for e in range(4):
            rows = (chosen == e).nonzero().flatten()[:most]
            out = out.index_add(0, rows, x[rows] * (e + 1))
        return out

    return program


def test_capacity_that_counts_rows_of_all_ranks_is_not_the_same_by_rank():
    assert verdict(with_capacity(8), with_capacity(8)).verified
    assert verdict(with_capacity(2), with_capacity(2)).verdict == "refuted"
