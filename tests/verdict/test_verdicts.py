"""Verdicts: what a proof and an execution say together, counterexamples, and what rounding may not be mistaken for."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import fails, judged, line_of

import graphguard as gg
from graphguard import Partial, Replicate, Shard
from graphguard.counterexample import shrinking
from graphguard.engine.proof import Proof, Relation
from graphguard.errors import InternalError
from graphguard.graph.findings import Finding
from graphguard.oracle import budget, progress
from graphguard.verdict.verdict import REAL_ARITHMETIC

SPLIT = {"x": gg.Input((4, 6), Shard(1)), "w": gg.Input((6, 3), Shard(0))}
COPIES = {"x": gg.Input((4, 6))}


def product(x, w):
    return x @ w


def reduced(x, w):
    y = x @ w
    dist.all_reduce(y)
    return y


def averaged(x, w):
    return reduced(x, w) / dist.get_world_size()


def twice(x, w):
    return 2 * reduced(x, w)


def same(x):
    return x


def first_half(x):
    return x[:2].clone()


def other_half(x):
    return x.chunk(2)[1 - dist.get_rank()].clone()


def turned(x):
    return x.t().contiguous()


def verify(sequential, distributed, inputs, mesh=2, **options):
    return gg.verify(sequential, distributed, mesh={"tp": mesh}, inputs=inputs, **options)


# ---------------------------------------------------------------------- refuted
def test_a_difference_is_refuted_with_an_element_of_either_program(monkeypatch):
    monkeypatch.setattr(shrinking, "MOST_RUNS", 0)
    report = verify(product, twice, SPLIT, seed=5)
    assert report.verdict == "refuted" and report.findings[0].kind == "unexplained-output"
    found = report.counterexample
    assert (found.seed, found.shapes) == (5, {"x": (4, 6), "w": (6, 3)})
    generator = torch.Generator().manual_seed(5)
    x, w = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 6), (6, 3)))
    element = found.element
    assert (element.path, element.rank, element.within) == ("out", 0, element.index)
    assert element.expected == pytest.approx(float((x @ w)[element.index]))
    assert element.actual == pytest.approx(2 * element.expected)
    assert found.lines()[0] == (
        f"counterexample: on rank 0, out[{element.index[0]}, {element.index[1]}] is {element.actual:.7g}, where the sequential "
        f"program has {element.expected:.7g}"
    )
    plain = json.loads(report.to_json())["counterexample"]
    assert plain["element"]["index"] == list(element.index) and plain["shapes"] == {"x": [4, 6], "w": [6, 3]}
    assert report.stats["seconds"]["oracle"] > 0 and report.stats["oracle"] == {"trials": 3, "seed": 5, "skipped": None}


def test_the_saved_script_fails_in_a_process_that_has_torch_alone(tmp_path):
    found = verify(product, twice, SPLIT).counterexample
    file = tmp_path / "counterexample.py"
    found.save(file)
    run = subprocess.run([sys.executable, "-I", str(file)], capture_output=True, text=True, check=False)
    assert run.returncode == 1 and f"AssertionError: {found.element.expected} is not {found.element.actual}" in run.stderr
    assert run.stdout == (f"out: the sequential program has {found.element.expected} and rank 0 has {found.element.actual}\n")
    with pytest.raises(gg.UsageError, match=r"the counterexample cannot be written to '.*': Is a directory"):
        found.save(tmp_path)


def test_the_first_tensor_that_parts_is_named_with_both_lines():
    def sequential(x, a, b):
        return torch.relu(x @ a) @ b  # here

    def distributed(x, a, b):
        y = torch.tanh(x @ a) @ b  # there
        dist.all_reduce(y)
        return y

    inputs = {"x": gg.Input((4, 6)), "a": gg.Input((6, 8), Shard(1)), "b": gg.Input((8, 3), Shard(0))}
    parting = judged(sequential, distributed, inputs).counterexample.parting
    assert parting.operator == "aten.relu" and parting.expected != parting.actual
    assert [parting.sequential.line, parting.distributed.line] == [line_of(__file__, f"# {mark}") for mark in ("here", "there")]


def test_copies_that_are_scaled_are_no_parts():
    report = verify(product, averaged, SPLIT)
    assert (report.verdict, report.findings[0].kind) == ("refuted", "scaled-copies")
    assert report.counterexample.element.actual == pytest.approx(report.counterexample.element.expected / 2)
    stated = verify(product, averaged, SPLIT, outputs={"out": Partial()})
    assert (stated.verdict, stated.findings[0].kind) == ("refuted", "scaled-copies")
    assert not judged(product, averaged, SPLIT, outputs={"out": Partial("avg")}).conjecture  # the mean is half of it too
    assert judged(product, twice, SPLIT, outputs={"out": Partial("avg")}).different


def test_scalars_are_parts_unless_every_trial_has_the_same_shares():
    def total(x):
        return x.sum()

    def share(x):
        y = x.sum()
        dist.all_reduce(y)
        return y / 2

    inputs = {"x": gg.Input((4, 6), Shard(0))}
    parts = judged(total, total, inputs)
    assert not parts.different and parts.conjecture == {"out": "out = sum(rank0.out, rank1.out)"}
    assert judged(total, share, inputs).kinds == {"out": "scaled-copies"}
    assert not judged(total, share, inputs, trials=1).different  # any number is a share of any other


def test_parts_are_no_shares_because_one_trial_outweighs_the_others():
    """Inputs at a scale of 64 give a number that is larger by a factor of 10^20, and is a share of itself."""

    def steep(x):
        return (x * x).sum().square().square().square().sum()

    def of_each(x):
        return steep(x)

    def summed(x):
        return sum(steep(each) for each in x.chunk(2))

    report = judged(summed, of_each, {"x": gg.Input((4, 6), Shard(0))}, outputs={"out": Partial()})
    assert not report.different and report.conjecture


def test_another_relation_than_the_stated_one_is_refuted():
    report = verify(product, product, SPLIT, outputs={"out": Replicate()})
    assert (report.verdict, report.findings[0].kind) == ("refuted", "unexpected-relation")
    assert not report.conjecture and fails(report.counterexample.script)
    by_code = judged(same, same, COPIES, outputs={"out": lambda full, coord: full.flip(0)})
    assert by_code.kinds == {"out": "unexpected-relation"} and fails(by_code.counterexample.script)
    turned = judged(same, lambda x: x.flip(0), COPIES, outputs={"out": lambda full, coord: full.flip(0)})
    assert not turned.different


def test_stated_sums_are_compared_as_sums():
    def off_by_one(x, w):
        return x @ w + 1

    found = judged(product, off_by_one, SPLIT, outputs={"out": Partial()}).counterexample
    assert found.element.reduced == "sum" and found.element.actual == pytest.approx(found.element.expected + 2)
    assert fails(found.script) and " (sum over the ranks), where" in found.lines()[0]


def test_what_no_rank_returns_is_refuted_without_numbers():
    report = verify(lambda x: {"a": x, "b": x + 1}, lambda x: {"a": x}, COPIES)
    assert (report.verdict, report.findings[0].kind, report.counterexample) == ("refuted", "missing-output", None)
    assert report.findings[0].sequential is not None


def test_an_output_that_a_wrapper_has_named_is_told():
    report = verify(lambda x: {"w": x * 1}, lambda x: {"module": {"w": x * 1}}, COPIES)
    assert report.findings[0].message == (
        "no rank returns w; they return module.w: return what is inside of the wrapper by its own name"
    )


def test_a_part_that_no_rank_holds_is_missed():
    assert judged(same, first_half, COPIES).different
    alone = judged(same, first_half, {"x": gg.Input((6, 2))}, mesh=2)  # no placement fits the shapes
    assert alone.different and fails(alone.counterexample.script)


def test_a_tensor_without_the_place_is_shown_by_its_shape():
    found = judged(same, lambda x: x.sum(0), COPIES).counterexample
    element = found.element
    assert found.lines()[0] == (
        f"counterexample: on rank 0, out has the shape [6], where the sequential program has {element.expected:.7g} at [0, 0]"
    )
    assert "nan" not in "".join(found.lines()) and found.to_plain()["element"]["shape"] == [6] and fails(found.script)


def test_an_index_outside_is_no_number(tmp_path):
    def lookup(ids, table):
        return F.embedding(ids, table)

    def unmasked(ids, table):
        y = F.embedding(ids - dist.get_rank() * table.shape[0], table)
        dist.all_reduce(y)
        return y

    inputs = {"ids": gg.Input((5,), dtype=torch.int64), "table": gg.Input((8, 3), Shard(0))}
    found = judged(lookup, unmasked, inputs).counterexample
    assert math.isnan(found.element.actual) and "raises here: index out of range" in found.script
    assert fails(found.script) and found.to_plain()["element"]["actual"] == "nan"


def test_findings_about_outputs_that_differ_come_first(monkeypatch):
    def distributed(x):
        return {"fine": x, "wrong": x + 1, "other": 3 * x}

    paths = ("fine", "wrong", "other")
    findings = [Finding("relation-lost", f"{path} has no description: too hard", output=path) for path in paths]
    monkeypatch.setattr("graphguard.pipeline.prove", lambda *graphs, **options: Proof({}, findings))
    report = verify(lambda x: {"fine": x, "wrong": x, "other": x}, distributed, COPIES)
    assert [(finding.output, finding.spoils) for finding in report.findings] == [("wrong", ("other",))]  # of one line
    assert "not proved either, and not seen to differ: fine" in report.notes
    assert report.counterexample.element.path == "wrong"


def test_the_finding_says_what_the_numbers_show(monkeypatch):
    findings = [Finding("relation-lost", "out has no description: too hard", output="out")]
    monkeypatch.setattr("graphguard.pipeline.prove", lambda *graphs, **options: Proof({}, findings))
    scaled = verify(product, averaged, SPLIT).findings[0]
    assert scaled.kind == "scaled-copies" and scaled.message.startswith("out: the ranks hold copies that are scaled")
    stated = verify(product, product, SPLIT, outputs={"out": Replicate()}).findings[0]
    assert (stated.kind, stated.message) == (
        "unexpected-relation",
        "out: the numbers show out = sum(rank0.out, rank1.out), which is not what is expected",
    )


def test_a_mean_over_ranks_is_named_as_what_may_be_meant():
    def means(x):
        return {"loss": x.square().mean(), "wrong": x.sum() * 3}

    def of_ranks(x):
        return {"loss": x.square().mean(), "wrong": x.sum() * 2}

    report = verify(means, of_ranks, {"x": gg.Input((4, 6), Shard(0))}, mesh=2)
    assert report.notes == [
        "loss: the mean over tp of what the ranks hold is the sequential value; either an average is missing, or it is meant, "
        'and outputs= should state Partial("avg")'
    ]


# ---------------------------------------------------------------------- verified and unproven
@pytest.mark.parametrize("placement", ["Replicate", "Partial(sum)"])
def test_a_proof_that_an_execution_does_not_show_is_an_internal_error(monkeypatch, placement):
    false = Proof({"out": Relation("out", "out = rank0.out", (("tp", placement),))})
    monkeypatch.setattr("graphguard.pipeline.prove", lambda *graphs, **options: false)
    with pytest.raises(InternalError) as caught:
        verify(product, twice, SPLIT)
    assert str(caught.value) == (
        "the proof says that out = rank0.out, and an execution in float64 does not show it; please report it with both programs"
    )


def test_what_is_equal_but_not_proved_has_a_conjecture():
    def doubled_angle(x):
        return 2 * x.sin() * x.cos()

    report = verify(lambda x: (2 * x).sin(), doubled_angle, COPIES)
    assert report.verdict == "unproven" and report.counterexample is None and report.findings
    assert report.conjecture == {"out": "out = rank0.out   (equal on all 2 ranks)"}
    assert json.loads(report.to_json())["conjecture"] == report.conjecture


@pytest.mark.parametrize(
    ("distributed", "text"),
    [
        (other_half, "rank0.out = out[2:4, :], rank1.out = out[0:2, :]"),
        (turned, "rank.out = out.permute(1, 0), on every rank"),
        (lambda x: x.reshape(3, 8), "rank.out = out.reshape(-1)[0:24], reshaped, on every rank"),
        (lambda x: x[:3] if dist.get_rank() == 0 else x[1:], "rank0.out = out[0:3, :], rank1.out = out[1:4, :]"),
        (lambda x: x * (dist.get_rank() == 0), "out = sum(rank0.out, rank1.out)"),
    ],
)
def test_clean_relations_of_any_order_are_no_difference(distributed, text):
    result = judged(same, distributed, COPIES)
    assert not result.different and result.conjecture == {"out": text}


def test_blocks_in_another_order_are_no_tile():
    assert judged(same, lambda x: torch.cat([x[2:], x[:2]]), COPIES).different


def test_ranks_that_do_not_form_a_grid():
    def diagonal(x):
        return x if dist.get_rank() in (0, 3) else None

    mesh = {"dp": 2, "tp": 2}
    assert judged(same, diagonal, COPIES, mesh).conjecture == {"out": "out = rank0.out   (equal on all 2 ranks)"}
    assert judged(same, lambda x: None if diagonal(x) is None else x + 1, COPIES, mesh).different


def test_nothing_is_claimed_where_the_sequential_program_is_not_defined():
    def rooted(x):
        return torch.sqrt(x)

    assert not judged(rooted, lambda x: torch.where(x >= 0, torch.sqrt(x), 7.0), COPIES).different
    assert judged(rooted, lambda x: torch.where(x > 0, torch.sqrt(x), 7.0), COPIES).different  # at zero
    squared = judged(lambda x: x, lambda x: torch.sqrt(x) ** 2, COPIES)
    assert squared.different and math.isnan(squared.counterexample.element.actual)
    below = {"x": gg.Input((4, 6), low=-3, high=-1)}
    never = judged(rooted, rooted, below)
    assert never.undecided == {"out": "the sequential program gives no finite number on the trial inputs"}


def test_bounds_of_inputs_are_kept():
    def absolute(x):
        return x.abs()

    assert judged(absolute, same, COPIES).different
    assert not judged(absolute, same, {"x": gg.Input((4, 6), low=0)}).different
    assert not judged(absolute, same, {"x": gg.Input((4, 6), low=0.5, high=2)}).different
    assert not judged(absolute, lambda x: -x, {"x": gg.Input((4, 6), high=0)}).different
    whole = {"x": gg.Input((50,), dtype=torch.int64, low=3, high=5)}
    assert not judged(same, lambda x: x.clamp(3, 4), whole).different
    assert judged(same, lambda x: x.clamp(3, 4), {"x": gg.Input((50,), dtype=torch.int64)}).different


def test_random_numbers_are_not_compared():
    def noisy(x):
        return F.dropout(x, 0.5)

    report = verify(noisy, noisy, COPIES)
    assert report.verdict == "verified" and report.assumptions[1].endswith("are any numbers: all ranks draw the same")
    assert "out: the oracle says nothing of it, because it depends on random numbers" in report.notes
    assert judged(same, noisy, COPIES).different


def test_what_overflows_at_larger_scales_is_no_difference():
    """Where there is no proof, larger inputs are tried too; a softmax without a shift overflows there, on the ranks alone."""

    def shares(x):
        return torch.softmax(x.sort(-1).values, -1)

    def by_hand(x):
        weights = x.flip(-1).sort(-1).values.exp()
        return weights / weights.sum(-1, keepdim=True)

    assert verify(shares, by_hand, {"x": gg.Input((4, 6))}).verdict == "unproven"


def test_what_cancels_up_to_rounding_is_no_difference():
    def gradient(x, w, bias):  # of a shift of all scores, which softmax does not see: zero
        bias = bias.detach().requires_grad_()
        scores = x @ w + bias
        return torch.autograd.grad((torch.softmax(scores, -1) * w.sum()).sum(), bias)[0]

    def in_another_order(x, w, bias):
        return gradient(x.flip(0), w, bias) * 3

    inputs = {"x": gg.Input((4, 6)), "w": gg.Input((6, 3)), "bias": gg.Input(())}
    assert not judged(gradient, in_another_order, inputs).different


def test_what_drowns_in_large_inputs_is_no_difference():
    """A softmax of large scores picks one, and its gradient is 0; block by block, as rings merge, rounding is left of it."""

    def gradient(q, k, v):
        k = k.detach().requires_grad_()
        return torch.autograd.grad(((q * k).softmax(-1) * v * q).sum(), k)[0] * q**3

    def by_blocks(q, k, v):
        scores, weighed = q * k, v * q
        log, out = scores[..., :1], weighed[..., :1]
        for score, block in zip(scores[..., 1:].split(1, -1), weighed[..., 1:].split(1, -1), strict=True):
            out, log = out - torch.sigmoid(score - log) * (out - block), log - F.logsigmoid(log - score)
        return q**4 * (scores - log).exp() * (weighed - out)

    result = judged(gradient, by_blocks, {name: gg.Input((32, 8)) for name in "qkv"})
    assert not result.different and result.trials == 15


def test_numbers_that_stand_for_infinity_hide_nothing():
    def masked(x):
        return x.masked_fill(torch.ones(4, 6).triu(1).bool(), -1e9)

    assert judged(masked, lambda x: masked(x * (1 + 1e-4)), COPIES).different
    assert not judged(masked, lambda x: masked(x * (1 + 1e-12)), COPIES).different


def test_overflow_of_large_inputs_is_no_difference():
    def stable(x):
        return torch.logsumexp(300 * x, -1)

    def unstable(x):
        return torch.log(torch.exp(300 * x).sum(-1))

    small = {"x": gg.Input((4, 6), low=-1, high=1)}
    assert not judged(stable, unstable, small).different


# ---------------------------------------------------------------------- limits, premises, assumptions
def test_what_is_too_large_is_not_executed():
    proved = verify(product, reduced, SPLIT, limits={"trial_bytes": 1000})
    assert proved.verdict == "verified" and proved.stats["seconds"]["oracle"] is None
    assert proved.notes == [
        "the oracle was skipped because its tensors would need 0.0 GB, more than 0 GB; the verdict rests on the proof alone"
    ]
    wrong = verify(product, twice, SPLIT, limits={"trial_bytes": 1000})
    assert wrong.verdict == "unproven" and [stop.limit for stop in wrong.stopped] == ["trial_bytes"]
    assert wrong.notes[0].endswith("; so it is not known whether the programs differ")
    assert wrong.stats["oracle"]["skipped"] == "its tensors would need 0.0 GB, more than 0 GB"


def test_of_what_is_too_large_the_output_without_a_proof_is_executed():
    def sequential(x, w):
        return {"fine": x @ w @ w.t() @ w, "wrong": x[:, 0].sum()}

    def distributed(x, w):
        whole = sequential(x, w)
        wrong = whole["wrong"] * dist.get_rank()
        dist.all_reduce(wrong)
        return {"fine": whole["fine"], "wrong": wrong * 2}

    inputs = {"x": gg.Input((8, 4)), "w": gg.Input((4, 60))}
    report = verify(sequential, distributed, inputs, limits={"trial_bytes": 5000})
    assert (report.verdict, report.counterexample.element.path) == ("refuted", "wrong")
    assert report.counterexample.lines()[:3] == [
        "counterexample: on rank 0, wrong is 2, where the sequential program has 1",
        "  inputs       x[0, 0] = 1, 0 elsewhere",
        "  shapes       x [8, 4]",
    ]
    assert fails(report.counterexample.script) and "# w" not in report.counterexample.script
    assert report.notes == [
        "the oracle executed wrong and what it is made from alone, because in all its tensors would need 0.0 GB, more than 0 GB"
    ]
    assert verify(sequential, distributed, inputs, limits={"trial_bytes": 100}).verdict == "unproven"


def test_who_waits_is_told_how_far_the_oracle_is(monkeypatch):
    told = []
    judged(product, reduced, SPLIT, progress=lambda done, total: told.append((done, total)))
    assert not told  # it does not take a second
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "_PAUSE", 0.0)
    judged(product, reduced, SPLIT, progress=lambda done, total: told.append((done, total)))
    assert len(told) > 10 and {total for _, total in told} == {3 * (2 * 1 + 2 * 3)}
    assert told == sorted(told) and told[-1][0] <= told[-1][1]


def test_what_takes_too_long_has_fewer_trials_or_none(monkeypatch):
    monkeypatch.setattr("graphguard.verdict.judge.cost", lambda graphs: budget.Cost(bytes=100, seconds=15.0))
    assert judged(product, reduced, SPLIT).trials == 1
    monkeypatch.setattr("graphguard.verdict.judge.cost", lambda graphs: budget.Cost(bytes=100, seconds=25.0))
    assert judged(product, reduced, SPLIT).skipped == "a trial would take about 25 s, more than 20 s"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"trials": -1}, "trials= is -1; write how often both programs are executed, 0 to take a proof as it is"),
        ({"trials": 1.5}, "trials= is 1.5; write how often both programs are executed, 0 to take a proof as it is"),
        ({"seed": -3}, "seed= is -3; write a whole number from 0 on"),
        ({"seed": "x"}, "seed= is 'x'; write a whole number from 0 on"),
    ],
)
def test_trials_and_seed_are_checked(options, text):
    with pytest.raises(gg.UsageError) as caught:
        verify(product, reduced, SPLIT, **options)
    assert str(caught.value) == text


def test_without_a_proof_other_scales_are_tried():
    """A norm that is clipped: on inputs of the usual size it is not."""

    def clipped(x):
        return x * (100 / x.norm()).clamp(max=1.0)

    def clipped_by_own_norm(x):
        return x * (100 / x.norm()).clamp(max=1.0)

    report = verify(clipped, clipped_by_own_norm, {"x": gg.Input((4, 6), Shard(0))})
    assert report.verdict == "refuted" and report.stats["oracle"]["trials"] == 15


def test_trials_are_as_many_as_asked_for():
    assert verify(product, reduced, SPLIT, trials=5).stats["oracle"] == {"trials": 5, "seed": 0, "skipped": None}
    assert verify(product, reduced, SPLIT, trials=0).stats["oracle"]["skipped"] == "trials=0 was asked for"


def test_without_trials_a_proof_is_not_looked_at_but_a_counterexample_is_sought(monkeypatch):
    report = verify(product, twice, SPLIT, trials=0)
    assert report.verdict == "refuted" and report.stats["oracle"] == {"trials": 3, "seed": 0, "skipped": None}

    def both(x, w):
        return {"proved": product(x, w), "wrong": product(x, w)}

    def of_ranks(x, w):
        return {"proved": reduced(x, w), "wrong": twice(x, w)}

    assert [finding.output for finding in verify(both, of_ranks, SPLIT, trials=0).findings][:1] == ["wrong"]
    false = Proof({"out": Relation("out", "out = rank0.out", (("tp", "Replicate"),))})
    monkeypatch.setattr("graphguard.pipeline.prove", lambda *graphs, **options: false)
    assert verify(product, twice, SPLIT, trials=0).verdict == "verified"  # the proof alone is believed


def test_what_is_taken_for_granted_is_listed():
    def cast(x, w):
        return (x.bfloat16() @ w.bfloat16()).float()

    report = verify(cast, lambda x, w: cast(x, w), {"x": gg.Input((4, 6)), "w": gg.Input((6, 3))})
    assert report.assumptions == [REAL_ARITHMETIC, "casts between bfloat16 and float32 are taken as exact (9 casts)"]


def test_an_input_that_nobody_reads_is_noted():
    inputs = {**COPIES, "unused": gg.Input((3,)), "of_ranks": gg.Input((4, 6))}
    report = verify(lambda x, unused, of_ranks: x, lambda x, unused, of_ranks: x + of_ranks - of_ranks, inputs)
    assert report.notes == ["the input unused is read by neither program"]


def in_order(x, **options):
    equal = x[:, :1].expand(x.shape)
    return x.gather(1, equal.argsort(dim=1, **options))


def test_equal_elements_keep_their_places_only_in_a_stable_order():
    inputs = {"x": gg.Input((4, 6), Shard(0))}
    assert verify(lambda x: x, lambda x: in_order(x, stable=True), inputs).verdict == "verified"
    assert verify(lambda x: x, in_order, inputs).verdict != "verified"


def test_a_scatter_to_some_of_the_positions_is_none_to_all():
    def scattered(count):
        return lambda x: torch.zeros_like(x).scatter(1, x.topk(count).indices, 1.0)

    inputs = {"x": gg.Input((4, 6), Shard(0))}
    assert verify(torch.ones_like, scattered(6), inputs).verdict == "verified"
    assert verify(torch.ones_like, scattered(5), inputs).verdict == "refuted"
