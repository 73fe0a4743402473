"""`bincount` with as many results as its operands can ask for: load balancing of experts."""

import pytest
import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Partial, Replicate, Shard
from graphguard.errors import GraphGuardError

LOGITS = {"logits": gg.Input((8, 4), Shard(0))}
LABELS = {"labels": gg.Input((8,), Shard(0), dtype=torch.int64, low=0, high=5)}


def of_the_first(logits):
    return torch.bincount(logits.argmax(-1), minlength=4)


def of_the_first_two(logits):
    return torch.bincount(logits.topk(2, dim=-1).indices.flatten(), minlength=6)


def checked(counts, inputs=LOGITS, reduced=True, **options):
    def sequential(**given):
        return {"n": counts(**given)}

    def distributed(**given):
        n = counts(**given)
        if reduced:
            dist.all_reduce(n)
        return {"n": n}

    return gg.verify(sequential, distributed, mesh={"dp": 2}, inputs=inputs, outputs={"n": Replicate()}, **options)


@pytest.mark.parametrize("counts", [of_the_first, of_the_first_two], ids=lambda counts: counts.__name__)
def test_positions_are_counted(counts):
    assert checked(counts).verified
    assert checked(counts, reduced=False).verdict == "refuted"


@pytest.mark.parametrize("least", [5, 7])
def test_inputs_of_a_stated_range_are_counted(least):
    assert checked(lambda labels: torch.bincount(labels, minlength=least), LABELS).verified
    assert checked(lambda labels: torch.bincount(labels, minlength=least), LABELS, reduced=False).verdict == "refuted"


@pytest.mark.parametrize(
    "counts, inputs",
    [
        (lambda logits: torch.bincount(logits.argmax(-1), minlength=3), LOGITS),
        (lambda logits: torch.bincount(logits.argmax(-1)), LOGITS),
        (lambda logits: torch.bincount(logits.argmax(-1) + 1, minlength=4), LOGITS),
        (lambda labels: torch.bincount(labels, minlength=4), LABELS),
    ],
    ids=["too few", "none", "computed", "larger input"],
)
def test_how_many_results_there_are_may_be_a_matter_of_values(counts, inputs):
    try:
        report = checked(counts, inputs, paths=2)
    except GraphGuardError as error:  # the ranks count up to numbers of their own, and add nothing up
        assert "all_reduce" in str(error)
    else:
        assert report.paths is not None or report.verdict == "refuted"


def test_parts_of_a_sum_have_no_range():
    inputs = {"labels": gg.Input((8,), Partial(), dtype=torch.int64, low=0, high=5)}
    with pytest.raises(GraphGuardError, match="bincount only supports 1-d non-negative integral inputs"):
        checked(lambda labels: torch.bincount(labels, minlength=5), inputs)
