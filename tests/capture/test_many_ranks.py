"""Very many ranks, of which no graph is written out: what is said of them is what is said of ranks matched one by one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import graphguard as gg
from graphguard import Partial, Replicate, Shard
from graphguard.api import capture_function
from graphguard.capture.torch import session
from graphguard.capture.torch.lanes import classes

VECTOR, ROWS = {"x": gg.Input((24,))}, {"x": gg.Input((24, 4), Shard(0))}


@pytest.fixture(autouse=True)
def any_number_of_classes(monkeypatch):
    monkeypatch.setattr(classes, "_is_too_much", lambda *counts: False)


def both_ways(monkeypatch, *programs, **options):
    """The reports of the same programs: by classes alone, and rank by rank."""
    monkeypatch.setattr(session, "BY_CLASS_FROM", 2)
    monkeypatch.setattr(session, "WRITTEN_OUT", 0)
    by_classes = gg.verify(*programs, **options)
    assert by_classes.stats["classes"], by_classes.stats
    monkeypatch.setattr(session, "WRITTEN_OUT", 1 << 20)
    return by_classes, gg.verify(*programs, **options)


def assert_same(monkeypatch, *programs, **options):
    many, few = both_ways(monkeypatch, *programs, **options)
    assert many.verdict == few.verdict
    assert str(many.relation) == str(few.relation)
    assert [(each.kind, each.message) for each in many.findings] == [(each.kind, each.message) for each in few.findings]
    assert many.assumptions == few.assumptions and many.notes == few.notes
    assert many.stats["ops"] == few.stats["ops"]
    return many


# ---------------------------------------------------------------------- programs
def mlp(x, a, b):
    return torch.relu(x @ a) @ b


def tp_mlp(x, a, b):
    y = torch.relu(x @ a) @ b
    dist.all_reduce(y)
    return y


MLP = {"x": gg.Input((4, 8)), "a": gg.Input((8, 16), Shard(1)), "b": gg.Input((16, 8), Shard(0))}


def stages(x):
    """The same stage on each rank: all but the first have to wait for one that is of their own kind."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.recv(x, rank - 1)
    y = x * 2 + 1
    if rank < size - 1:
        dist.send(y, rank + 1)
        return None
    return y


def all_stages(x):
    for _ in range(4):
        x = x * 2 + 1
    return x


def shifted(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    works = [dist.isend(x, (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
    for work in works:
        work.wait()
    return received


def rolled(x):
    return torch.roll(x, 6, 0)


def from_roots(x):
    """Each group has a root of its own."""
    groups = [dist.new_group(list(range(start, start + 2))) for start in range(0, dist.get_world_size(), 2)]
    dist.broadcast(x, dist.get_rank() // 2 * 2, group=groups[dist.get_rank() // 2])
    return x


def over_two_axes(x, mesh):
    y = x.sum(0)
    dist.all_reduce(y, group=mesh.get_group("b"))
    dist.all_reduce(y, group=mesh.get_group("a"))
    return y


# ---------------------------------------------------------------------- right ones
def test_one_class(monkeypatch):
    report = assert_same(monkeypatch, mlp, tp_mlp, mesh={"tp": 4}, inputs=MLP)
    assert report.verified and report.stats["classes"] == 1


def test_a_pipeline_of_stages_that_are_alike(monkeypatch):
    report = assert_same(monkeypatch, all_stages, stages, mesh={"pp": 4}, inputs=VECTOR)
    assert report.verified and str(report.relation) == "out = rank3.out"


def test_a_ring(monkeypatch):
    assert assert_same(monkeypatch, rolled, shifted, mesh=4, inputs=ROWS).verified


def test_groups_with_roots_of_their_own(monkeypatch):
    assert assert_same(monkeypatch, lambda x: x, from_roots, mesh=4, inputs={"x": gg.Input((24,))}).verified


def test_two_axes(monkeypatch):
    placed = {"x": gg.Input((24, 4), {"a": Shard(0), "b": Shard(0)})}
    outputs = {"out": Replicate()}
    report = assert_same(monkeypatch, lambda x: x.sum(0), over_two_axes, mesh={"a": 2, "b": 3}, inputs=placed, outputs=outputs)
    assert report.verified and report.stats["classes"] == 1


def test_a_partial_output(monkeypatch):
    outputs = {"out": Partial()}
    assert assert_same(monkeypatch, lambda x: x.sum(0), lambda x: x.sum(0), mesh=4, inputs=ROWS, outputs=outputs).verified


def test_a_layout_by_code(monkeypatch):
    outputs = {"out": lambda full, coord: full.chunk(4)[coord["world"]]}
    assert assert_same(monkeypatch, lambda x: x * 2, lambda x: x * 2, mesh=4, inputs=ROWS, outputs=outputs).verified


class Linear(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.up = nn.Parameter(torch.empty(8, inner))
        self.down = nn.Parameter(torch.empty(inner, 8))

    def forward(self, x):
        return torch.relu(x @ self.up) @ self.down


class Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Parallel(Linear):
    def forward(self, x):
        return Reduced.apply(super().forward(x))


def test_modules(monkeypatch):
    monkeypatch.setattr(session, "BY_CLASS_FROM", 2)
    verdicts = []
    for most in (0, 1 << 20):
        monkeypatch.setattr(session, "WRITTEN_OUT", most)
        report = gg.verify_model(
            sequential=lambda: Linear(16),
            distributed=lambda mesh: Parallel(4),
            step=gg.train_step(lambda model, x: model(x).square().sum()),
            mesh={"tp": 4},
            inputs={"x": gg.Input((2, 8))},
        )
        verdicts.append((report.verdict, str(report.relation), report.parameters))
    assert verdicts[0] == verdicts[1] and verdicts[0][0] == "verified"


# ---------------------------------------------------------------------- wrong ones
def unsummed(x, a, b):
    return torch.relu(x @ a) @ b * 2


def test_a_missing_sum_is_refuted(monkeypatch):
    report = assert_same(monkeypatch, mlp, unsummed, mesh={"tp": 4}, inputs=MLP)
    assert report.verdict == "refuted"


def test_a_gradient_that_one_stage_lacks(monkeypatch):
    program = lambda x: None if dist.get_rank() == 2 else x * 2
    many, few = both_ways(monkeypatch, lambda x: x * 2, program, mesh=4, inputs=ROWS, outputs={"out": Shard(0)})
    assert many.verdict == few.verdict == "refuted"


def waits_for_the_next(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.recv(x, (rank + 1) % size)
    dist.send(x, (rank - 1) % size)
    return x


def one_message_too_few(x):
    rank = dist.get_rank()
    if rank % 2 == 0:
        dist.send(x, rank + 1)
        dist.send(x, rank + 1)
    else:
        dist.recv(x, rank - 1)
    return x


def another_shape(x):
    y = torch.zeros(4 if dist.get_rank() < 2 else 5)
    dist.all_reduce(y)
    return x


def one_too_few(x):
    if dist.get_rank() > 0:
        dist.all_reduce(x)
    return x


def to_itself(x):
    dist.send(x, dist.get_rank())
    return x


def another_root(x):
    dist.broadcast(x, dist.get_rank() // 2)
    return x


FAULTS = {
    waits_for_the_next: "deadlock",
    one_message_too_few: "unmatched-message",
    another_shape: "collective-mismatch",
    one_too_few: "collective-mismatch",
    another_root: "collective-mismatch",
}


@pytest.mark.parametrize("program", FAULTS, ids=lambda each: each.__name__)
def test_what_does_not_fit_together(program, monkeypatch):
    many, few = both_ways(monkeypatch, lambda x: x, program, mesh=4, inputs=VECTOR)
    assert (many.verdict, many.findings[0].kind) == ("refuted", FAULTS[program])
    assert many.findings[0].kind == few.findings[0].kind


# ---------------------------------------------------------------------- very many
def test_nothing_is_written_out_of_very_many_ranks():
    split = {"x": gg.Input((16, 8), {"dp": Shard(0)}), "a": gg.Input((8, 4096), {"tp": Shard(1)})}
    inputs = {**split, "b": gg.Input((4096, 8), {"tp": Shard(0)})}
    captured = capture_function(mlp, tp_mlp, mesh={"dp": 8, "tp": 128}, inputs=inputs)
    assert captured.matched is not None and captured.classes == 1
    assert not captured.ranks._made and not captured.relations._made
    assert len(captured.ranks) == 1024 and captured.ranks[-1].rank == 1023
