"""Limits of work: what is left open names the limit, more may be allowed, and no other output and no clock matters."""

import json
import re
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import graphguard as gg
from graphguard import Partial, Replicate, Shard, pipeline
from graphguard.api import capture_function
from graphguard.cli import app
from graphguard.engine import limits as engine_limits
from graphguard.engine.limits import Limits, ProofStops
from graphguard.engine.prove import prove
from graphguard.errors import UsageError
from graphguard.graph.ancestry import outputs_by_node
from graphguard.graph.limits import Stop
from graphguard.lemmas.known import all_lemmas
from graphguard.verdict import limits as all_limits
from graphguard.verdict.judge import are_seen_to_differ
from graphguard.verdict.limits import limits_of, parsed, stated

PACKAGE = Path(gg.__file__).parent
VECTOR = gg.Input((8,))
CHECK = """
import graphguard as gg


@gg.check
def powers():
    def sequential(a, b):
        return (a + b) ** 4

    def distributed(a, b):
        return a**4 + 4 * a**3 * b + 6 * a * a * b * b + 4 * a * b**3 + b**4

    return gg.verify(sequential, distributed, mesh=2, inputs={"a": gg.Input((8,)), "b": gg.Input((8,))})
"""


def fourth(a, b):
    return (a + b) ** 4


def fourth_written_out(a, b):
    return a**4 + 4 * a**3 * b + 6 * a * a * b * b + 4 * a * b**3 + b**4


def variance(x):
    return ((x - x.mean()) ** 2).mean()


def variance_of_squares(x):
    return (x * x).mean() - x.mean() ** 2


def power_of_sum(limits=None):
    return gg.verify(fourth, fourth_written_out, mesh=2, inputs={"a": VECTOR, "b": VECTOR}, limits=limits)


# ---------------------------------------------------------------------- what is reached is named
def test_an_unproven_report_names_the_limit_that_was_reached():
    report = power_of_sum()
    assert report.verdict == "unproven"
    assert "stopped: sums to powers above 3, written out; `--limits written_power=6`" in str(report)
    (plain,) = json.loads(report.to_json())["stopped"]
    assert (plain["limit"], plain["allowed"], plain["needed"], plain["outputs"]) == ("written_power", 3, 4, ["out"])


def test_what_a_report_says_to_allow_for_is_enough():
    name, number = power_of_sum().stopped[0].retry.removeprefix("--limits ").split("=")
    report = power_of_sum({name: int(number)})
    assert report.verified and report.stopped == ()


def test_a_product_of_too_many_factors_names_its_limit():
    def product(a, b, c):
        return a * b * c

    inputs = {name: gg.Input((8,), Shard(0)) for name in "abc"}
    assert gg.verify(product, product, mesh=2, inputs=inputs).verified
    report = gg.verify(product, product, mesh=2, inputs=inputs, limits={"factors": 2})
    assert report.verdict == "unproven" and [stop.limit for stop in report.stopped] == ["factors"]


def test_the_suggestion_doubles_until_it_is_enough():
    assert Stop("factors", 24, "{}", needed=25).retry == "--limits factors=48"
    assert Stop("factors", 24, "{}", needed=100).retry == "--limits factors=192"
    assert Stop("factors", 24, "{}").retry == "--limits factors=48"


@pytest.mark.parametrize("limit", ["ranks_apart", "operations_apart"])
def test_more_than_is_described_one_by_one_is_named(limit):
    inputs = {"a": VECTOR, "b": VECTOR}
    report = gg.verify(fourth, fourth_written_out, mesh=2, inputs=inputs, limits={limit: 1})
    assert {stop.limit for stop in report.stopped} == {"written_power", limit}


def test_what_is_described_well_is_not_described_again(monkeypatch):
    """A relation that is another one than is stated is the same one if each rank is described by itself."""
    proofs = []
    bare = pipeline.prove
    monkeypatch.setattr(pipeline, "prove", lambda *graphs, **options: proofs.append(1) or bare(*graphs, **options))
    inputs, outputs = {"a": gg.Input((4,), Partial())}, {"out": Replicate()}
    report = gg.verify(lambda a: a * 2, lambda a: a * 2, mesh=2, inputs=inputs, outputs=outputs, limits={"trial_bytes": 1})
    assert report.verdict == "unproven" and report.findings[0].kind == "unexpected-relation" and len(proofs) == 1


# ---------------------------------------------------------------------- outputs
@pytest.mark.parametrize("after", [torch.clone, torch.sqrt])  # compared at the end, and while operations are described
def test_trouble_with_one_output_leaves_another_proved(after):
    def sequential(a, b, x):
        return {"hard": after(fourth(a, b)), "easy": after(variance(x))}

    def distributed(a, b, x):
        return {"hard": after(fourth_written_out(a, b)), "easy": after(variance_of_squares(x))}

    inputs = {"a": gg.Input((8,), low=0.0), "b": gg.Input((8,), low=0.0), "x": VECTOR}
    captured = capture_function(sequential, distributed, mesh=2, inputs=inputs)
    proofs = [
        prove(captured.sequential, captured.world(), lemmas=all_lemmas(), limits=Limits(work=work)) for work in range(1, 20)
    ]
    least = next(proof for proof in proofs if "easy" in proof.relations)
    assert list(least.relations) == ["easy"] and {finding.output for finding in least.findings} == {"hard"}
    assert [stop.outputs for stop in least.stopped if stop.limit == "written_power"] == [("hard",)]
    assert all(stop.outputs == ("hard",) for stop in proofs[-1].stopped)


def test_what_one_rank_sends_is_for_what_another_returns():
    def sequential(x):
        return {"sent": torch.relu(x), "own": torch.exp(x)}

    def distributed(x):
        if dist.get_rank() == 0:
            dist.send(torch.relu(x), 1)
            return {"own": torch.exp(x)}
        received = torch.empty(8)
        dist.recv(received, 0)
        return {"sent": received}

    captured = capture_function(sequential, distributed, mesh=2, inputs={"x": VECTOR})
    found = outputs_by_node(captured.sequential, captured.world())
    of_first = {node.op.split(".")[1]: sorted(found[node]) for node in captured.ranks[0].nodes if node.op != "dist.wait"}
    assert of_first == {"relu": ["sent"], "send": ["sent"], "exp": ["own"]}
    assert [sorted(found[node]) for node in captured.sequential.nodes] == [["sent"], ["own"]]


def test_work_in_vain_is_bounded():
    captured = capture_function(variance, variance_of_squares, mesh=2, inputs={"x": VECTOR})
    proof = prove(captured.sequential, captured.world(), lemmas=all_lemmas(), limits=Limits(work=2))
    assert not proof.relations and [stop.limit for stop in proof.stopped] == ["work"]


# ---------------------------------------------------------------------- ranks that are wrong
def test_of_ranks_that_are_seen_to_be_wrong_less_is_tried():
    asked = []
    stops = ProofStops(are_wrong=lambda: asked.append(1) or True)
    assert (stops.allowed("work", 100), stops.allowed("astray", 2000)) == (1000, 40_000) and not asked
    assert (stops.allowed("work", 101), stops.allowed("astray", 2001)) == (100, 2000) and len(asked) == 1
    assert ProofStops(Limits(work=7), are_wrong=lambda: True).allowed("work", 101) == 7
    assert ProofStops(are_wrong=lambda: False).allowed("work", 101) == ProofStops().allowed("work", 101) == 1000


def test_what_looked_wrong_and_is_not_is_proved_with_all_that_is_allowed(monkeypatch):
    monkeypatch.setattr(engine_limits, "_OF_WRONG_RANKS", {"astray": 0, "work": 0})
    monkeypatch.setattr(pipeline, "are_seen_to_differ", lambda *programs, **options: True)
    assert gg.verify(variance, variance_of_squares, mesh=2, inputs={"x": VECTOR}).verified


def test_whether_ranks_differ_is_seen_before_anything_is_proved():
    def seen(distributed, **limits):
        captured = capture_function(variance, distributed, mesh=2, inputs={"x": VECTOR})
        graphs = captured.sequential, captured.joint, captured.relations
        return are_seen_to_differ(*graphs, {}, {}, limits=limits_of(limits))

    assert seen(lambda x: variance(x) * 1.5) and not seen(variance_of_squares)
    assert not seen(lambda x: variance(x) * 1.5, trial_bytes=1), "it is not executed"


# ---------------------------------------------------------------------- clocks
def test_a_slow_clock_changes_nothing(monkeypatch):
    def wrong(x, a, b):
        return torch.relu(x @ a) @ b

    inputs = {"x": gg.Input((4, 8)), "a": gg.Input((8, 8), Shard(1)), "b": gg.Input((8, 4), Shard(0))}

    def said():
        report = gg.verify(wrong, wrong, mesh=2, inputs=inputs, outputs={"out": Replicate()})
        programs = [str(program) for program in report.listing]
        return {key: text for key, text in report.to_plain().items() if key != "stats"}, programs

    before = said()
    clock = iter(range(0, 10**9, 1000))
    for name in ("perf_counter", "monotonic", "time"):
        monkeypatch.setattr(time, name, lambda: float(next(clock)))
    assert said() == before
    assert before[0]["verdict"] == "refuted" and before[0]["findings"][0]["holdings"]


def test_a_tile_that_was_not_looked_for_everywhere_does_not_refute():
    def signs_of_some(x):
        return torch.sign(x * x - 1)[5:261]

    inputs = {"x": gg.Input((1024,))}
    assert gg.verify(lambda x: x.sign(), signs_of_some, mesh=2, inputs=inputs).verdict == "refuted"
    report = gg.verify(lambda x: x.sign(), signs_of_some, mesh=2, inputs=inputs, limits={"tile_elements": 1})
    assert report.verdict == "unproven"
    assert {stop.limit for stop in report.stopped} == {"tiles", "tile_elements"}


# ---------------------------------------------------------------------- stating limits
def test_limits_are_stated_by_name():
    assert limits_of({"factors": 48}).engine.factors == 48
    assert parsed("factors=48,cells=128") == {"factors": 48, "cells": 128}
    with stated({"factors": 7}):
        assert limits_of({"factors": 48, "cells": 3}).engine == limits_of({"factors": 7, "cells": 3}).engine
    assert limits_of() == all_limits.Limits()


@pytest.mark.parametrize("limits", [{"factor": 3}, {"factors": -1}, {"factors": 1.5}, {"factors": True}, ["factors"]])
def test_what_is_no_limit_is_an_error(limits):
    with pytest.raises(UsageError):
        power_of_sum(limits)


def test_an_unknown_limit_is_told_with_those_that_there_are():
    with pytest.raises(UsageError, match=r"no limit 'factor'; did you mean factors\? There are: .*cells, .*work"):
        parsed("factor=3")


@pytest.mark.parametrize("text", ["factors", "factors=", "factors=many", "=3"])
def test_the_option_is_names_and_numbers(text):
    with pytest.raises(UsageError):
        parsed(text)


@pytest.mark.parametrize(("limits", "code"), [("written_power=6", 0), ("written_power=2", 3), ("power=6", 2)])
def test_the_command_line_takes_limits(tmp_path, limits, code):
    file = tmp_path / "powers.py"
    file.write_text(CHECK)
    result = CliRunner().invoke(app, ["verify", str(file), "--limits", limits])
    assert isinstance(result.exception, UsageError) if code == 2 else result.exit_code == code


def test_every_limit_is_used_and_has_one_name():
    names = [each.name for room in fields(all_limits.Limits) for each in fields(room.default_factory)]
    sources = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    asked = set(re.findall(r'\b(?:_?table|stops|self|_records)\.(?:over|note)\("(\w+)"', sources)) | {
        "elements",
        "elements_of_ranks",
    }
    assert sorted(names) == sorted(asked)
