"""Modules whose ranks are captured at once, and what the docs say of programs by hand."""

import importlib

import pytest
import torch
import torch.distributed as dist
from harness import ROOT
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphguard as gg
from graphguard.api import capture_model
from graphguard.capture.torch import session
from graphguard.capture.torch.lanes import classes


@pytest.fixture(autouse=True)
def any_number_of_classes(monkeypatch):
    monkeypatch.setattr(classes, "_is_too_much", lambda *counts: False)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("wrong", [False, True])
def test_a_module_of_dtensors(wrong):
    def parallel(mesh):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return parallelize_module(Mlp(), mesh["tp"], plan)

    def loss(model, x):
        return model(x).square().mean() * (2 if wrong and dist.is_initialized() else 1)

    report = gg.verify_model(
        sequential=Mlp, distributed=parallel, step=gg.train_step(loss), mesh={"dp": 2, "tp": 4}, inputs={"x": gg.Input((4, 8))}
    )
    assert report.verdict == ("refuted" if wrong else "verified"), report
    assert report.stats["classes"] == 2  # those that DTensor scatters from, and the others


def test_classes_that_differ_in_how_a_module_is_built_are_proved_as_one(monkeypatch):
    monkeypatch.setattr(session, "WRITTEN_OUT", 0)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    found = capture_model(
        Mlp,
        lambda mesh: parallelize_module(Mlp(), mesh["tp"], plan),
        step=gg.train_step(lambda model, x: model(x).square().mean()),
        mesh={"dp": 2, "tp": 4},
        inputs={"x": gg.Input((4, 8))},
    )
    assert found.classes == 2 and len(found.world().classes) == 1  # only the roots of a scatter read the whole
    assert any("while the module was built" in each for each in found.assumptions)


def test_the_page_says_how_many_classes_programs_by_hand_are(monkeypatch):
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "hooks"))
    table = importlib.import_module("classes")
    for program in table.PROGRAMS[:4]:
        assert table.row(program) in table.PAGE.read_text()
