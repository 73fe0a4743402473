"""What counts as being on a path, and what reports along paths say together, where something is missing."""

from __future__ import annotations

import pytest
import torch
from harness import capture_both

from graphguard import Input, Shard
from graphguard.aten.kernels import constant_of
from graphguard.capture.front import Along
from graphguard.errors import InternalError
from graphguard.oracle.replay import run, run_joint
from graphguard.report.report import Report
from graphguard.verdict.on_path import OnPath
from graphguard.verdict.paths import of_paths

INPUTS = {"x": Input((4, 2), Shard(0))}
SAMPLE = torch.tensor([[1.0, 1.0], [-1.0, 0.0], [2.0, 0.0], [0.0, -3.0]])
OTHER = SAMPLE.flip(0)


def masked(x):
    chosen = x.sum(-1) > 0
    return {"y": torch.where(chosen.unsqueeze(-1), x, 0.0), "z": x * 2}


def programs():
    found = capture_both(masked, masked, 2, INPUTS)
    graphs = [found.sequential, *found.joint.graphs]
    decisions = [next(v for node in graph.nodes for v in node.outputs if node.op.startswith("aten.gt")) for graph in graphs]
    return found, decisions


def runs(found, x):
    return run(found.sequential, {"x": x}), run_joint(found.joint, [{"x": part} for part in x.chunk(2)])


def path_of(found, decisions):
    alone, ranks = runs(found, SAMPLE)
    known = ({v: constant_of(state.values[v])} for state, v in zip([alone, *ranks], decisions, strict=True))
    along = Along({"x": constant_of(SAMPLE)}, found, (), tuple(known), {})
    return OnPath(along, {})


def test_a_run_of_other_inputs_is_not_on_the_path_though_it_comes_first():
    found, decisions = programs()
    path = path_of(found, decisions)
    assert not path.has(*runs(found, OTHER))
    assert path.has(*runs(found, SAMPLE)) and path.has(*runs(found, SAMPLE * 2))


def test_a_run_that_does_not_decide_is_not_known_to_be_on_the_path():
    found, decisions = programs()
    path = path_of(found, decisions)
    alone, ranks = runs(found, SAMPLE)
    del ranks[1].values[decisions[2]]
    assert not path.has(alone, ranks)


def report(verdict):
    return Report(verdict=verdict)


def test_no_path_is_no_verdict():
    with pytest.raises(InternalError, match="have no path, and are not refuted; please report it"):
        of_paths([])


@pytest.mark.parametrize("verdict", ["verified", "unproven"])
def test_only_what_is_refuted_may_have_no_path(verdict):
    with pytest.raises(InternalError, match="have no path, and are not refuted; please report it"):
        of_paths([(None, report(verdict))])
    assert of_paths([(None, report("refuted"))]).verdict == "refuted"
