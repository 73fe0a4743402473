"""Cases, examples and library programs: captured by classes, each rank's graph is what a capture of that rank alone gives."""

import os
import re

import pytest
from harness import ROOT
from test_cases import LOADED, cheapest, world

import graphguard as gg
from graphguard.capture.front import ranks_apart
from graphguard.capture.torch import front, session
from graphguard.capture.torch.lanes import classes
from graphguard.checks.discovery import find_checks
from graphguard.graph.rank_class import same_graph

ALL = os.environ.get("GRAPHGUARD_TEST_CASES") == "all"
EXAMPLES = ROOT / "examples"
# Of each family of cases the cheapest on more than two ranks, and some examples; `make test-all` compares every one.
CASES = [
    case
    for family in LOADED
    for case in (family.CASES if ALL else [cheapest([each for each in family.CASES if world(each) > 2] or family.CASES)])
]
SOME = {
    "torch_fully_shard::over_tensor_parallelism", "torch_pipelining::interleaved", "torch_context_parallel::ring",
    "megatron_gpt::gpt_with_sequence_parallelism",
}  # fmt: skip
STRATEGIES = {"expert_parallel", "three_axes", "zero_sharded_step", "pipeline_two_stages", "dropout", "low_rank_adapters"}
NEEDS = {"transformers": "transformers", "megatron": "megatron.core.models.gpt.gpt_layer_specs", "torchtitan": "torchtitan",
         "accelerate": "accelerate", "deepspeed": "deepspeed"}  # fmt: skip


ONE_BY_ONE = {
    "read_before_wait::buggy": "something that is told of one rank",  # a race, which names the rank
    "fixed-routes-loss-dp2-ep2": "rank 0 alone is captured as another program",  # its constants are cut in another order
}


class Compared(gg.GraphGuardError):
    """Both captures were made, and are equal: there is nothing to prove here."""


@pytest.fixture(autouse=True)
def compares(monkeypatch):
    """Whoever captures a check captures it both ways, and goes no further."""
    monkeypatch.setattr(session, "BY_CLASS_FROM", 2)
    monkeypatch.setattr(session, "CAPTURED_TWICE", ())
    monkeypatch.setattr(classes, "_is_too_much", lambda *counts: False)
    monkeypatch.setattr(front, "capture", _compare)


def _compare(subject, **options):
    at_once = session.capture(subject, **options)
    with ranks_apart():
        alone = session.capture(subject, **options)
    for one, other in zip([*at_once.relations, *at_once.ranks], [*alone.relations, *alone.ranks], strict=True):
        assert same_graph(one, other), f"{one}\n{other}"
    assert at_once.assumptions == alone.assumptions
    assert [each.message for each in at_once.joint.findings] == [each.message for each in alone.joint.findings]
    raise Compared(at_once.by_rank or "by classes")


def checks_in(folder, wanted):
    """By name, checks of the files of a folder, which are imported when they are run; of a file that is named, the first."""
    for file in sorted(folder.glob("*.py")):
        for place, name in enumerate(re.findall(r"@gg\.check[^\n]*\ndef (\w+)", file.read_text())):
            if ALL or f"{file.stem}::{name}" in wanted or (place == 0 and file.stem in wanted):
                yield pytest.param(file, name, id=f"{file.stem}::{name}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case):
    with pytest.raises(Compared, match=ONE_BY_ONE.get(case.name, "by classes")):
        gg.verify(case.sequential, case.distributed, **case.options)


@pytest.mark.parametrize(("file", "name"), [*checks_in(EXAMPLES, STRATEGIES), *checks_in(EXAMPLES / "bugs", ())])
def test_example(file, name):
    compare_check(file, name)


@pytest.mark.parametrize(("file", "name"), checks_in(EXAMPLES / "libraries", SOME))
def test_library(file, name):
    pytest.importorskip(NEEDS.get(file.stem.split("_")[0], "torch"))
    compare_check(file, name)


def compare_check(file, name):
    for check in find_checks(f"{file}::{name}"):
        with pytest.raises(Compared, match=ONE_BY_ONE.get(f"{file.stem}::{name}", "by classes")):
            check.run()
