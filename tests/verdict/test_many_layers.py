"""A model of many layers with one fault: one finding, which names the layer and the line, in every format."""

import json

import pytest
import torch
import torch.distributed as dist
from harness import line_of
from torch import nn

import graphguard as gg
from graphguard.checks.check import Check, Outcome
from graphguard.render.github import github
from graphguard.render.html import page
from graphguard.render.junit import junit
from graphguard.render.sarif import sarif

LAYERS, WRONG = 32, 17


class Mlp(nn.Module):
    def __init__(self, size=1):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8 // size, bias=False), nn.Linear(8 // size, 4, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Parallel(Mlp):
    def __init__(self, size, sums):
        super().__init__(size)
        self.sums = sums

    def forward(self, x):
        y = self.down(torch.tanh(self.up(x)))  # the fault
        if self.sums:
            dist.all_reduce(y)
        return y


class Net(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layers = nn.ModuleList(make(n) for n in range(LAYERS))

    def forward(self, x):
        hidden = []
        for layer in self.layers:
            x = x + layer(x)
            hidden.append(x)
        return {"hidden": hidden}


def check(wrong):
    return gg.verify_model(
        lambda: Net(lambda n: Mlp()),
        lambda mesh: Net(lambda n: Parallel(mesh.size(), n != wrong)),
        mesh={"tp": 2},
        inputs={"x": gg.Input((2, 4))},
    )


@pytest.fixture(scope="module")
def report():
    return check(WRONG)


def test_without_a_fault_it_verifies():
    assert check(None).verified


def test_one_fault_is_one_finding_that_names_the_layer_and_the_line(report):
    assert report.verdict == "refuted"
    (finding,) = report.findings
    assert finding.module == f"layers.{WRONG}.down"
    assert finding.distributed.line == line_of(__file__, "# the fault")
    assert len(finding.spoils) == LAYERS - WRONG - 1  # all hidden states after it
    assert f"distributed  layers.{WRONG}.down (" in str(report)
    assert f" at layers.{WRONG}.down (" in report.gist


def test_every_format_names_the_layer(report):
    outcome = Outcome(Check("wrong", "model.py", None, "verified"), report, None)
    plain = json.loads(json.dumps({"version": 1, "checks": [outcome.to_plain()]}))
    name = f"layers.{WRONG}.down"
    assert [finding["module"] for finding in plain["checks"][0]["findings"]] == [name]
    ((result,),) = [run["results"] for run in sarif(plain)["runs"]]
    assert result["locations"][0]["logicalLocations"] == [{"fullyQualifiedName": name, "kind": "module"}]
    (annotation,) = github(plain).splitlines()
    assert f"It is in {name}." in annotation and "more outputs are wrong because of it: " in annotation
    assert f"module {name}" in junit(plain) and f"{name} (" in page(report)
