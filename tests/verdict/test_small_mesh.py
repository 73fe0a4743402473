"""Where all ranks are too much to execute, the same programs on fewer ranks are looked at, and the report says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard, pipeline
from graphguard.errors import InternalError

MESH = {"dp": 4, "tp": 8}
INPUTS = {"x": gg.Input((8, 16), [Shard(0), Shard(1)]), "w": gg.Input((16, 8), [gg.Replicate(), Shard(0)])}
FEW_BYTES = {"trial_bytes": 40_000}  # one program has less, and 32 ranks have more


def product(x, w):
    return torch.tanh(x @ w)


def summed(x, w, mesh):
    y = x @ w
    dist.all_reduce(y, group=mesh.get_group("tp"))
    return torch.tanh(y)


def summed_too_late(x, w, mesh):
    y = torch.tanh(x @ w)
    dist.all_reduce(y, group=mesh.get_group("tp"))
    return y


def with_groups(program):
    def ranks(x, w):
        return program(x, w, dist.device_mesh.init_device_mesh("cpu", mesh_of_the_world(), mesh_dim_names=("dp", "tp")))

    return ranks


def mesh_of_the_world():
    """As a script derives it from the world."""
    tp = 8 if dist.get_world_size() == 32 else 2
    return dist.get_world_size() // tp, tp


def verify(program, **options):
    return gg.verify(product, with_groups(program), mesh=MESH, inputs=INPUTS, **options)


def test_a_program_that_is_right_is_executed_on_fewer_ranks():
    report = verify(summed, limits=FEW_BYTES)
    assert report.verdict == "verified"
    assert report.notes[0] == "on the mesh dp=2 x tp=2, where they can be executed, the same programs are verified"
    assert "the verdict rests on the proof alone" in report.notes[1]


def test_of_one_that_is_wrong_fewer_ranks_show_it():
    report = verify(summed_too_late, limits=FEW_BYTES)
    assert report.verdict == "unproven", "the ranks that were asked for were not executed"
    where = "on the mesh dp=2 x tp=2, where they can be executed, the same programs are refuted: "
    assert report.notes[0].startswith(where) and "test_small_mesh.py:" in report.notes[0]


def test_nothing_is_said_where_all_ranks_were_executed_or_nothing_can_be():
    assert verify(summed).notes == []
    assert len(verify(summed, limits={"trial_bytes": 100}).notes) == 1
    assert len(verify(summed, limits=FEW_BYTES, trials=0).notes) == 1


def test_a_program_for_one_mesh_alone_is_not_executed():
    def ranks(x, w):
        return summed(x, w, dist.device_mesh.init_device_mesh("cpu", (4, 8), mesh_dim_names=("dp", "tp")))

    report = gg.verify(product, ranks, mesh=MESH, inputs=INPUTS, limits=FEW_BYTES)
    assert report.verdict == "verified"
    assert report.notes[0].startswith("the same programs could not be executed on the mesh dp=2 x tp=2 either: ")


def test_a_defect_of_ours_that_fewer_ranks_show_is_not_hidden(monkeypatch):
    bare = pipeline.decide

    def broken(problem, *args, **options):
        if problem.mesh.size == 4:
            raise InternalError("the proof says another thing")
        return bare(problem, *args, **options)

    monkeypatch.setattr(pipeline, "decide", broken)
    with pytest.raises(InternalError, match="the proof says another thing"):
        verify(summed, limits=FEW_BYTES)


class Kept:
    """In the place of a folder: one answer."""

    report = None

    def key(self, question):
        return "the only one"

    def recall(self, key, problem):
        return self.report and replace(self.report, notes=list(self.report.notes))

    def keep(self, key, problem, report):
        self.report = replace(report, notes=list(report.notes))


def test_what_fewer_ranks_show_is_not_kept_with_the_answer():
    kept = Kept()
    with pipeline.keeping(kept):
        reports = [verify(summed, limits=FEW_BYTES) for _ in range(2)]
    assert reports[0].notes == reports[1].notes and reports[0].notes[0].startswith("on the mesh dp=2 x tp=2")
    assert len(kept.report.notes) == 1, "another program for fewer ranks may have the same graphs for these"
