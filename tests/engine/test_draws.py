"""Random numbers of both programs: which draws of the ranks stand for which of the sequential program, and what is assumed."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

COLUMNS = {"mesh": {"tp": 2}, "inputs": {"x": gg.Input((4, 3)), "w": gg.Input((3, 8), Shard(1))}}
ROWS = {"mesh": {"dp": 2}, "inputs": {"x": gg.Input((4, 3), Shard(0)), "w": gg.Input((3, 8))}}
WHOLE = {"mesh": {"tp": 2}, "inputs": {"x": gg.Input((4, 3)), "w": gg.Input((3, 8))}}


def dropped(x, w):
    return F.dropout(torch.relu(x @ w), 0.25)


def dropped_by_rank(x, w):
    torch.manual_seed(dist.get_rank())
    return dropped(x, w)


def dropped_twice(x, w):
    return F.dropout(torch.relu(F.dropout(x @ w, 0.5)), 0.5)


def reason(report):
    assert report.verdict == "unproven"
    return report.findings[0].detail.split("has no description: ")[1]


def test_a_whole_tensor_is_drawn_once_and_a_split_one_by_ranks_of_their_own():
    together = gg.verify(dropped, dropped, **WHOLE, outputs={"out": Replicate()})
    assert together.verdict == "verified"
    assert any(line.endswith("are any numbers: all ranks draw the same") for line in together.assumptions)
    apart = gg.verify(dropped, dropped_by_rank, **COLUMNS, outputs={"out": Shard(1)})
    assert apart.verdict == "verified"
    assert any(line.endswith("are any numbers: each rank's are a part along tp") for line in apart.assumptions)


def test_the_same_mask_for_different_parts_is_not_proved():
    assert reason(gg.verify(dropped, dropped, **COLUMNS)) == "the same random numbers for different parts of a tensor"


def test_different_masks_for_a_whole_tensor_are_not_proved():
    found = reason(gg.verify(dropped, dropped_by_rank, **WHOLE))
    assert found == "random numbers that differ along tp, of a tensor that is whole there"


def drawn_weight(x, w):
    torch.manual_seed(0)
    return x @ (w + torch.randn(w.shape))


def weight_of(source, sent=True):
    """Each rank draws a weight of its own, and then has that of one rank."""

    def program(x, w):
        torch.manual_seed(dist.get_rank())
        drawn = torch.randn(w.shape)
        if sent:
            dist.broadcast(drawn, src=source)
        return x @ (w + drawn)

    return program


def test_a_weight_that_rank_0_sends_to_all_is_the_sequential_one():
    report = gg.verify(drawn_weight, weight_of(0), **WHOLE, outputs={"out": Replicate()})
    assert report.verdict == "verified"
    assert any(
        line.endswith("those of rank 0 are the sequential ones, and others are drawn apart") for line in report.assumptions
    )


def test_weights_that_are_not_sent_or_are_those_of_another_rank_are_not_proved():
    for program in (weight_of(0, sent=False), weight_of(1)):
        found = reason(gg.verify(drawn_weight, program, **WHOLE))
        assert found == "random numbers that differ along tp, of a tensor that is whole there"


def test_a_state_that_is_used_twice_gives_the_same_numbers_twice():
    def overlapping(x, w):
        torch.manual_seed(dist.get_rank())
        h = F.dropout(x @ w, 0.5)
        torch.manual_seed(1 + dist.get_rank())
        return F.dropout(torch.relu(h), 0.5)

    found = reason(gg.verify(dropped_twice, overlapping, **ROWS))
    assert found == "random numbers that are drawn a second time from the same state"


def test_the_stream_of_a_whole_tensor_goes_on_beside_those_of_ranks():
    def forked(x, w):
        torch.manual_seed(3)
        h = F.dropout(x @ w, 0.5)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(100 + dist.get_rank())
            return F.dropout(torch.relu(h.chunk(2, -1)[dist.get_rank()]), 0.5)

    assert gg.verify(dropped_twice, forked, **WHOLE, outputs={"out": Shard(1)}).verdict == "verified"


def test_gradients_have_the_mask_of_the_forward():
    def trained(x, w, v, dy):
        leaves = [t.detach().requires_grad_() for t in (x, w, v)]
        return torch.autograd.grad((dropped(*leaves[:2]) @ leaves[2] * dy).sum(), leaves)

    def trained_tp(x, w, v, dy):
        torch.manual_seed(dist.get_rank())
        grads = list(trained(x, w, v, dy))
        dist.all_reduce(grads[0])
        return grads

    split = COLUMNS["inputs"] | {"v": gg.Input((8, 3), Shard(0)), "dy": gg.Input((4, 3))}
    report = gg.verify(trained, trained_tp, mesh={"tp": 2}, inputs=split, outputs={"0": Replicate()})
    assert report.verdict == "verified"


@pytest.mark.parametrize(
    "other",
    [lambda x, w: F.dropout(torch.relu(x @ w), 0.5), dropped_twice, lambda x, w: torch.relu(x @ w) * torch.rand(4, 8)],
    ids=["another probability", "one draw more", "another operator"],
)
def test_draws_that_do_not_correspond_are_not_proved(other):
    assert gg.verify(dropped, other, **WHOLE).verdict == "unproven"


def test_uniform_numbers_of_other_ranges_are_other_numbers():
    def drawn(high):
        return lambda x, w: x @ w + torch.empty(4, 8).uniform_(0, high)

    assert gg.verify(drawn(1), drawn(1), **WHOLE).verdict == "verified"
    assert gg.verify(drawn(1), drawn(2), **WHOLE).verdict == "unproven"


def test_what_is_dropped_altogether_is_left_open():
    def nothing_left(x, w):
        return torch.native_dropout(x @ w, 1.0, True)[0]

    assert reason(gg.verify(nothing_left, nothing_left, **WHOLE)) == "aten.native_dropout.default leaves this result open"
