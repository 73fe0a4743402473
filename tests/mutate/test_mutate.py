"""Mutants and rewrites: what they do to programs, how they are judged, and that no mutant is verified that differs."""

import importlib
import os
from random import Random

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import graphguard as gg
from graphguard import Shard
from graphguard.cli import app
from graphguard.engine.proof import Proof
from graphguard.errors import UsageError
from graphguard.graph.placement import SUM
from graphguard.mutate import campaign, tally
from graphguard.mutate.mutant import Breeder, judged, mutants_of, rewrites_of
from graphguard.mutate.mutants import KINDS
from graphguard.mutate.page import page
from graphguard.mutate.processes import Died, in_processes
from graphguard.mutate.rewrites import REWRITES
from graphguard.mutate.specimen import Specimen, specimen
from graphguard.pipeline import collecting


def job_of(sequential, distributed, **options):
    with collecting() as jobs:
        gg.verify(sequential, distributed, **options)
    return jobs[0]


def case(module, name):
    found = next(case for case in importlib.import_module(f"cases.{module}").CASES if case.name == name)
    return specimen(name, job_of(found.sequential, found.distributed, **found.options))


def mlp(x, a, b):
    return torch.relu(x @ a) @ b


def tp_mlp(x, a, b):
    y = torch.relu(x @ a) @ b
    dist.all_reduce(y)
    return y


def tp_mlp_unreduced(x, a, b):
    return torch.relu(x @ a) @ b


MLP = {
    "mesh": {"tp": 2},
    "inputs": {"x": gg.Input((4, 3)), "a": gg.Input((3, 6), Shard(1)), "b": gg.Input((6, 4), Shard(0))},
}


@pytest.fixture(scope="module")
def small():
    return specimen("mlp", job_of(mlp, tp_mlp, **MLP))


# ---------------------------------------------------------------------- the slice of the campaign
SLICE = [
    ("identities", "identities-softmax-max-2"),
    ("mlp", "mlp-by-hand-tp2"),
    ("mlp", "mlp-relu-tp2"),
    ("vocabulary", "embedding-masked-fill-tp2"),
    ("data", "data-fsdp-flat-2"),
    ("norms", "norms-rms-hand-hidden-2"),
    ("data", "data-hierarchical-scatter-2"),
    ("published", "published-padded-behind-7-on-2"),
    ("reformulated", "forms-mean-count-dp2"),
]


@pytest.mark.parametrize(("module", "name"), SLICE, ids=[name for _, name in SLICE])
def test_no_mutant_that_differs_is_verified_and_rewrites_are_equal(module, name):
    mutants, rewrites = campaign.Herd(case(module, name), 7).some(20, 8)
    assert tally.unsound([*mutants, *rewrites]) == []
    assert [outcome.words for outcome in rewrites if outcome.difference is not None] == []
    assert sum(outcome.difference is not None for outcome in mutants) > 8


# ---------------------------------------------------------------------- what changes do
def change(small, kind, op, changes=KINDS):
    """The first change of a kind at an operator, made on all ranks."""
    breeder = Breeder(small, changes, Random(0))
    rank, position = next(
        (rank, position) for rank, position in breeder.sites[kind] if small.joint.graphs[rank].nodes[position].op == op
    )
    return breeder._made(kind, rank, position, True)


def operators(mutant):
    return [node.op.split(".")[1] for node in mutant.joint.graphs[0].nodes]


def test_a_dropped_all_reduce_is_gone_with_its_wait(small):
    mutant = change(small, "drop a collective", "dist.all_reduce")
    assert operators(mutant) == ["mm", "relu", "mm"]
    assert mutant.ranks == (0, 1)
    assert small.difference(mutant.joint) == "out differs"


def test_an_operation_moves_before_a_collective():
    def relu_last(x, a):
        return torch.relu(x @ a)

    def relu_of_sum(x, a):
        y = x @ a
        dist.all_reduce(y)
        return torch.relu(y)

    inputs = {"x": gg.Input((4, 6), Shard(1)), "a": gg.Input((6, 3), Shard(0))}
    made = specimen("relu", job_of(relu_last, relu_of_sum, mesh={"tp": 2}, inputs=inputs))
    mutant = change(made, "move across a collective", "aten.relu.default")
    assert operators(mutant) == ["mm", "relu", "all_reduce", "wait"]
    assert judged(made, mutant, 10).difference == "out differs"


def test_another_group_is_one_that_the_rank_is_in(small):
    mutant = change(small, "change the group", "dist.all_reduce")
    groups = [node.kwargs["group"] for graph in mutant.joint.graphs for node in graph.nodes if node.op == "dist.all_reduce"]
    assert groups == [(0,), (1,)]


def test_a_fault_of_one_rank_leaves_the_others_as_they_are(small):
    breeder = mutants_of(small, "0")
    ones = [mutant for mutant in breeder.several(60) if len(mutant.ranks) == 1]
    assert ones
    for mutant in ones:
        other = 1 - mutant.ranks[0]
        assert mutant.joint.graphs[other] is small.joint.graphs[other]


def test_an_all_reduce_in_two_steps(small):
    rewrite = change(small, "all-reduce as reduce-scatter and all-gather", "dist.all_reduce", REWRITES)
    assert operators(rewrite)[3:] == ["reduce_scatter_tensor", "wait", "all_gather_into_tensor", "wait", "view"]
    outcome = judged(small, rewrite, 10)
    assert outcome.difference is None and outcome.proved


def test_the_same_seed_gives_the_same_mutants(small):
    drawn = [[str(mutant) for mutant in mutants_of(small, seed).several(20)] for seed in ("3", "3", "4")]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 20


def test_every_kind_is_drawn_somewhere():
    specimens = [case(module, name) for module, name in SLICE]
    assert set(KINDS) == {kind for made in specimens for kind in mutants_of(made, "0").sites}
    missing = set(REWRITES) - {kind for made in specimens for kind in rewrites_of(made, "0").sites}
    assert missing == {"all-reduce of each addend"}


# ---------------------------------------------------------------------- how they are judged
def test_only_the_sum_counts_where_the_relation_is_a_sum():
    def total(x):
        return x.sum(0)

    made = specimen("sum", job_of(total, total, mesh={"dp": 2}, inputs={"x": gg.Input((4, 3), Shard(0))}))
    assert made.expected["out"].placements == (SUM,)
    assert made.difference(made.joint) is None
    scaled = change(made, "change the operator", "aten.sum.dim_IntList")
    assert made.difference(scaled.joint) == "out differs"


def test_a_layout_by_code_is_compared_too():
    def rows(x):
        return x * 2

    def mine(full, coord):
        return full.chunk(2)[1 - coord["dp"]]

    inputs = {"x": gg.Input((4, 3), local=mine)}
    made = specimen("rows", job_of(rows, rows, mesh={"dp": 2}, inputs=inputs, outputs={"out": mine}))
    mutants, _ = campaign.Herd(made, 0).some(10, 0)
    assert {outcome.difference.split(":")[0] for outcome in mutants} == {"out differs"}
    assert not any(outcome.proved for outcome in mutants)


def test_a_mutant_may_not_verify_by_another_relation(small):
    outcome = judged(small, change(small, "drop a collective", "dist.all_reduce"), 10)
    assert not outcome.proved  # it is a sum over ranks now
    assert outcome.reason.startswith("unexpected-relation")
    assert outcome.located


def shifted(far):
    def softmax(x):
        weights = (x - far(x)).exp()
        return weights / weights.sum(-1, keepdim=True)

    return softmax


def test_what_only_overflows_is_equal():
    """Any shift of a row gives the same softmax of real numbers; one is too far away for floats where the inputs are large."""
    options = {"mesh": {"dp": 2}, "inputs": {"x": gg.Input((4, 6), Shard(0))}}
    softmax = shifted(lambda x: 0)
    whole = specimen("softmax", job_of(softmax, softmax, **options))
    assert whole.difference(gg.capture_function(softmax, shifted(lambda x: 60 * x.abs().sum()), **options).joint) is None
    assert whole.difference(gg.capture_function(softmax, shifted(lambda x: x / 2), **options).joint) == "out differs"


def test_a_prover_that_believes_everything_is_found_out(small, monkeypatch):
    monkeypatch.setattr(Specimen, "prove", lambda self, joint, agrees, locate: Proof())
    mutants, _ = campaign.Herd(small, 0).some(30, 0)
    row = tally.rows(mutants, KINDS)[-1]
    assert row.unsound > 20 and row.refused + row.unsound + row.verified == row.total
    assert "is left out" in "\n".join(tally.unsound(mutants))


def test_a_proof_that_takes_too_long_is_stopped(small):
    outcome = judged(small, change(small, "split a batch", "aten.relu.default", REWRITES), 1e-4)
    assert outcome.gave_up and not outcome.proved and not outcome.incomplete


def test_a_prover_that_raises_is_told(small, monkeypatch):
    def prove(self, joint, agrees, locate):
        raise KeyError("atom")

    monkeypatch.setattr(Specimen, "prove", prove)
    outcome = judged(small, change(small, "split a batch", "aten.relu.default", REWRITES), 10)
    assert not outcome.proved and outcome.incomplete
    assert "CRASH mlp: split a batch" in campaign.as_report([], [outcome])


def test_one_that_cannot_be_run_is_told_and_the_others_are_judged(small, monkeypatch):
    honest = Specimen.difference
    joints = []

    def difference(self, joint, further=False):
        joints.append(joint)
        if len(joints) == 2:
            raise KeyError("a kernel")
        return honest(self, joint, further)

    monkeypatch.setattr(Specimen, "difference", difference)
    mutants, _ = campaign.Herd(small, 0).some(5, 0)
    assert len(mutants) == 5
    (crash,) = tally.crashes(mutants)
    assert mutants[1].crash.startswith("KeyError: 'a kernel' (test_mutate.py:") and mutants[1].words in crash
    assert campaign.Result(mutants).exit_code == 2 and campaign.Result(mutants[2:]).exit_code == 0


def test_one_that_cannot_be_made_is_told(small, monkeypatch):
    herd = campaign.Herd(small, 0)
    made = herd.mutants._made
    drawn = []

    def broken(kind, *place):
        drawn.append(kind)
        if len(drawn) == 1:
            raise KeyError("factor")
        return made(kind, *place)

    monkeypatch.setattr(herd.mutants, "_made", broken)
    mutants, _ = herd.some(4, 0)
    assert len(mutants) == 4 and mutants[0].kind == drawn[0]
    assert mutants[0].crash.startswith(f"{drawn[0]} at ") and "KeyError: 'factor'" in mutants[0].crash


def test_a_second_proof_describes_ranks_one_by_one_as_in_a_report():
    made = case("positions", "positions-labels-before-2")
    assert made.apart and made.prove(made.joint, agrees=False).proved


def test_a_process_that_dies_is_told_at_once_and_the_other_goes_on():
    def work(number, begin):
        begin(f"mutant {number}")
        yield number
        if number == 0:
            os._exit(7)
        begin("the last one")
        raise ValueError("none")

    found = list(in_processes(work, 2))
    assert {0, 1} < set(found)
    died = {each.words for each in found if isinstance(each, Died)}
    assert died == {
        "a process ended with exit code 7; mutant 0",
        "a process stopped with ValueError: none; the last one",
    }


def test_a_check_that_is_not_verified_is_not_mutated():
    with pytest.raises(UsageError, match=r"^mlp is not verified, and only a check that verifies can be mutated: "):
        specimen("mlp", job_of(mlp, tp_mlp_unreduced, **MLP, outputs={"out": gg.Replicate()}))


# ---------------------------------------------------------------------- tables, the page, the command line
def test_the_page_has_the_numbers(small):
    mutants, rewrites = campaign.Herd(small, 0).some(12, 4)
    text = page(mutants, rewrites, "make campaign", 60, {"mlp": "tensor"}, asked=12)
    assert (
        "| mutants | 12 |" in text
        and "| false proofs | **0** |" in text
        and "| tensor | 12 |" in text
        and "| rewrites still proved | 4 of 4 (100.0 %) |" in text
    )


def test_a_campaign_that_was_stopped_says_so(small):
    mutants, rewrites = campaign.Herd(small, 0).some(2, 1)
    assert "| mutants | 2, of 20,000 that were asked for |" in page(
        mutants, rewrites, "make campaign", 60, {"mlp": "tensor"}, asked=20000
    )


CHECKS = """
import torch, torch.distributed as dist
import graphguard as gg
from graphguard import Shard

def total(x):
    return x.sum(0)

def reduced(x):
    y = x.sum(0)
    dist.all_reduce(y)
    return y

def doubled(x):
    return reduced(x) * 2

def verify(program):
    return gg.verify(total, program, mesh={"dp": 2}, inputs={"x": gg.Input((4, 3), Shard(0))})

@gg.check
def right():
    return verify(reduced)

@gg.check
def wrong():
    return verify(doubled)
"""


@pytest.fixture
def checks(tmp_path):
    file = tmp_path / "sums.py"
    file.write_text(CHECKS)
    return file


def test_the_command_prints_the_tables(checks):
    result = CliRunner().invoke(app, ["mutate", f"{checks}::right", "-n", "20"], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout.startswith("mutation ")
    assert result.stdout.splitlines()[-1].startswith("20 mutants: ")
    again = CliRunner().invoke(app, ["mutate", f"{checks}::right", "-n", "20"], catch_exceptions=False)
    assert again.stdout == result.stdout


def test_the_command_fails_on_a_false_proof(checks, monkeypatch):
    honest = Specimen.prove
    monkeypatch.setattr("graphguard.mutate.specimen.Specimen.prove", lambda self, joint, agrees, locate: Proof())
    result = CliRunner().invoke(app, ["mutate", f"{checks}::right", "-n", "5"], catch_exceptions=False)
    assert result.exit_code == 1 and "UNSOUND" in result.stdout and "please report it" in result.stdout
    assert honest is not Specimen.prove


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{file}::wrong"], "is not verified, and only a check that verifies can be mutated"),
        (["{file}::right", "-n", "0"], "-n 0: write how many mutants are made, from 1 on"),
        (["{file}"], "has 2 checks; choose one: ::right, ::wrong"),
    ],
)
def test_what_cannot_be_mutated_is_one_sentence(checks, arguments, words):
    with pytest.raises(UsageError, match=words):
        CliRunner().invoke(
            app, ["mutate", *(text.format(file=checks) for text in arguments)], catch_exceptions=False, standalone_mode=False
        )
