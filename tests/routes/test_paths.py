"""Programs that read values, verified along the paths of samples, with faulty twins."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from harness import command
from path_cases import reading

import graphguard as gg
from graphguard import Replicate, Shard
from graphguard.errors import CaptureError, ProgramError, UsageError

ROWS = {"x": gg.Input((6, 4), Shard(0)), "w": gg.Input((4, 4))}
HALVES = {"x": gg.Input((6, 4)), "a": gg.Input((4, 8), Shard(1)), "b": gg.Input((8, 4), Shard(0))}
COLUMNS = {"x": gg.Input((4, 4)), "w": gg.Input((4, 4), Shard(1))}


def of_rows(program, **options):
    return gg.verify(selected, program, mesh={"dp": 2}, inputs=ROWS, outputs={"out": Shard(0)}, paths=3, **options)


# ---------------------------------------------------------------------- masks
def selected(x, w):
    rows = (x.sum(-1) > 0).nonzero().flatten()
    return torch.zeros_like(x).index_add(0, rows, x[rows] @ w)


def by_mask(x, w):
    chosen = x.sum(-1) > 0
    y = torch.zeros_like(x)
    y[chosen] = x[chosen] @ w
    return y


def one_row_late(x, w):
    rows = (x.sum(-1) > 0).nonzero().flatten()
    return torch.zeros_like(x).index_add(0, (rows + 1) % x.size(0), x[rows] @ w)


def test_rows_picked_by_nonzero_are_verified_along_paths():
    report = of_rows(selected)
    assert (report.verdict, report.paths) == ("verified", 3)
    assert report.headline == "verified along 3 paths"
    (decision,) = report.decisions
    assert decision.text.startswith("gt at ") and decision.ways == 3


def test_a_boolean_index_goes_the_same_way():
    assert of_rows(by_mask).headline == "verified along 3 paths"


def test_rows_put_elsewhere_are_refuted_by_a_script_that_runs(tmp_path):
    report = of_rows(one_row_late)
    assert report.verdict == "refuted" and report.counterexample is not None
    assert report.counterexample.inputs == ("x[4, 0] = 1", "x[5, 0] = 1", "w[0, 0] = 1", "0 elsewhere")
    script = tmp_path / "counterexample.py"
    script.write_text(report.counterexample.script)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 1 and "AssertionError" in done.stderr


def in_halves(x, a, b):
    chosen = x.sum(-1) > 0
    y = torch.zeros_like(x)
    y[chosen] = torch.relu(x[chosen] @ a) @ b
    return y


def summed(x, a, b):
    y = in_halves(x, a, b)
    dist.all_reduce(y)
    return y


@pytest.mark.parametrize("program, verdict", [(summed, "verified"), (in_halves, "refuted")])
def test_a_sum_over_ranks_of_picked_rows(program, verdict):
    report = gg.verify(in_halves, program, mesh={"tp": 2}, inputs=HALVES, outputs={"out": Replicate()}, paths=3)
    assert (report.verdict, report.paths is not None) == (verdict, True)


# ---------------------------------------------------------------------- experts
DROPLESS = [case for case in reading.CASES if case.name.startswith("dropless-")]


@pytest.mark.parametrize("case", DROPLESS, ids=lambda case: case.name)
def test_dropless_experts_with_all_gradients(case):
    """Expert parallelism alone, on more ranks, with tensor and with data parallelism."""
    report = gg.verify(case.sequential, case.distributed, **case.options, paths=2)
    assert report.headline == "verified along 2 paths"


def not_summed(mesh, **given):
    """The gradient of the router, which ranks have summands of, stays as it is."""
    kept, reading.summed_over = reading.summed_over, lambda mesh, grads: grads
    try:
        return reading.exchanged(mesh=mesh, **given)
    finally:
        reading.summed_over = kept


@pytest.mark.parametrize("case", DROPLESS[-2:], ids=lambda case: case.name)
def test_dropless_experts_whose_gradients_are_not_summed(case):
    assert gg.verify(case.sequential, not_summed, **case.options, paths=2).verdict == "refuted"


# ---------------------------------------------------------------------- branches
def clipped(x, w):
    y = x @ w
    size = y.square().sum()
    return y / size if size > 4 else y


def clipped_by_all(x, w):
    y = x @ w
    size = y.square().sum()
    dist.all_reduce(size)
    return y / size if size > 4 else y


def each_decides_for_itself(x, w):
    y = x @ w
    own = y.square().sum()
    size = own.clone()
    dist.all_reduce(size)
    return y / size if own > 4 else y


def some_do_not_come(x, w):
    y = x @ w
    size = y.square().sum()
    if size > 4:
        dist.all_reduce(size)
        y = y / size
    return y


def of_columns(program):
    return gg.verify(clipped, program, mesh={"tp": 2}, inputs=COLUMNS, outputs={"out": Shard(1)})


def test_both_ways_of_a_branch_are_tried():
    report = of_columns(clipped_by_all)
    assert report.headline == "verified along 2 paths"
    assert [choice.seen for choice in report.decisions] == ["it is False, True"]


@pytest.mark.parametrize("program", [each_decides_for_itself, some_do_not_come])
def test_a_rank_that_goes_another_way_is_refuted(program):
    """On most samples all go one way: those are looked for on which they do not."""
    assert of_columns(program).verdict == "refuted"


def mean_loss(x, w):
    loss = (x @ w).square().mean()
    if loss.isnan():
        raise ValueError("no number")
    return loss


def loss_of_all(x, w):
    loss = (x @ w).square().mean()
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    if loss.isnan():
        raise ValueError("no number")
    return loss


def own_loss(x, w):
    loss = (x @ w).square().mean()
    if loss.isnan():
        raise ValueError("no number")
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return loss


def test_a_loss_that_is_looked_at():
    report = gg.verify(mean_loss, loss_of_all, mesh={"dp": 2}, inputs=ROWS)
    assert report.headline == "verified along 1 path"


def test_a_decision_that_is_not_shown_to_be_the_sequential_one_leaves_it_unproven():
    report = gg.verify(mean_loss, own_loss, mesh={"dp": 2}, inputs=ROWS)
    assert report.verdict == "unproven"
    assert report.findings[0].message.startswith("what isnan at ")


def always(x, w):
    return x @ w


def only_ranks_look(x, w):
    y = x @ w
    return y if bool((y > -1e9).all()) else -y


def test_a_decision_that_only_ranks_make_is_assumed_and_leaves_it_unproven():
    report = gg.verify(always, only_ranks_look, mesh={"dp": 2}, inputs=ROWS, outputs={"out": Shard(0)})
    assert report.verdict == "unproven"
    assert any("decides what the sequential program does not" in each for each in report.assumptions)


# ---------------------------------------------------------------------- whole-number inputs
def packed(x, lengths, w):
    return torch.cat([part - part.mean(0) for part in x.split(lengths.tolist())]) @ w


def all_in_one(x, lengths, w):
    lengths.tolist()
    return (x - x.mean(0)) @ w


def of_lengths(program, values):
    inputs = {"x": gg.Input((8, 4)), "lengths": gg.Input((3,), dtype=torch.int64, values=values), "w": COLUMNS["w"]}
    return gg.verify(packed, program, mesh={"tp": 2}, inputs=inputs, outputs={"out": Shard(1)})


def test_sequences_packed_by_lengths_that_are_given():
    report = of_lengths(packed, [3, 1, 4])
    assert report.headline == "verified along 1 path"
    assert report.decisions[0].text == "the input lengths"
    assert of_lengths(all_in_one, [3, 1, 4]).verdict == "refuted"


def test_a_sample_on_which_the_sequential_program_raises_says_how_to_state_inputs():
    with pytest.raises(ProgramError, match=r"low=, high= and values= of gg.Input say on which"):
        of_lengths(packed, None)


@pytest.mark.parametrize(
    "values, said",
    [
        ([1, 2], r"values= has the shape \(2,\), and the input \(3,\)"),
        ("no", "values= is str; write a tensor"),
        ([0, 1, 2**40], "values= holds numbers that torch.int32 does not"),
    ],
)
def test_values_that_an_input_cannot_have(values, said):
    with pytest.raises(UsageError, match=said):
        gg.Input((3,), dtype=torch.int32, values=values)


# ---------------------------------------------------------------------- what other ranks send
def counted(x, w):
    kept = x[x.sum(-1) > 0]
    return {"rows": (kept @ w).sum(0)}


def gathered(fault):
    def program(x, w):
        kept = x[x.sum(-1) > 0]
        count = torch.tensor(kept.size(0) - fault).view(1)
        counts = [torch.empty_like(count) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, count)
        most = max(int(each) for each in counts)
        padded = torch.zeros(most, x.size(1)).index_copy(0, torch.arange(kept.size(0)), kept)
        every = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(every, padded)
        rows = torch.cat([each[: int(n)] for each, n in zip(every, counts, strict=True)])
        return {"rows": (rows @ w).sum(0)}

    return program


@pytest.mark.parametrize("fault, verdict", [(0, "verified")])
def test_counts_that_ranks_send_each_other_are_read(fault, verdict):
    report = gg.verify(counted, gathered(fault), mesh={"dp": 2}, inputs=ROWS, outputs={"rows": Replicate()}, paths=2)
    assert report.verdict == verdict


# ---------------------------------------------------------------------- what is refused
def test_a_free_number_that_is_read_is_refused():
    with pytest.raises(CaptureError, match=r"^the program reads a number \(f32\[\]\) that sum at .*test_paths.py:\d+ makes"):
        gg.verify(scaled, scaled, mesh={"dp": 2}, inputs={"x": gg.Input((4, 4))})


def scaled(x):
    return x * x.sum().item()


def drawn(x):
    return x if torch.rand(()) > 0.5 else -x


def test_what_random_numbers_decide_is_refused():
    with pytest.raises(CaptureError, match="depends on random numbers"):
        gg.verify(drawn, drawn, mesh={"dp": 2}, inputs={"x": gg.Input((4, 4))})


@pytest.mark.parametrize("paths", [0, True, "5"])
def test_paths_that_are_no_number(paths):
    with pytest.raises(UsageError, match=r"paths= is "):
        gg.verify(always, always, mesh={"dp": 2}, inputs=ROWS, paths=paths)


# ---------------------------------------------------------------------- reports
def test_a_report_for_all_inputs_has_no_paths():
    report = gg.verify(always, always, mesh={"dp": 2}, inputs=ROWS, outputs={"out": Shard(0)}, paths=2)
    assert report.headline == "verified" and report.paths is None
    assert json.loads(report.to_json())["paths"] is None


def test_every_form_of_a_report_says_that_it_is_along_paths(tmp_path):
    report = of_rows(selected)
    assert str(report).startswith("verified along 3 paths\n") and "decided: gt at " in str(report)
    plain = json.loads(report.to_json())
    assert plain["paths"] == 3 and plain["decisions"][0]["ways"] == 3
    assert "along 3 paths" in report.to_sarif()
    report.to_html(tmp_path / "report.html")
    assert "verified along 3 paths" in (tmp_path / "report.html").read_text()
    assert not any("decides" in text for text in [str(report), report.to_json(), report.to_sarif()])


def test_the_same_seed_takes_the_same_paths():
    assert of_rows(selected, seed=3).decisions == of_rows(selected, seed=3).decisions


CHECKED = """
import graphguard as gg

def largest(x):
    return x * 2 if x.sum() > 0 else x

@gg.check
def same():
    return gg.verify(largest, largest, mesh={"dp": 2}, inputs={"x": gg.Input((2, 2))})
"""


def test_the_exit_code_is_zero_and_with_strict_it_is_three(tmp_path, capsys):
    file = tmp_path / "checks_of_paths.py"
    file.write_text(CHECKED)
    code, out, _ = command(capsys, "verify", str(file))
    assert code == 0 and "verified along 2 paths: " in out
    assert "1 verified; 1 along paths; all as expected" in out
    code, out, _ = command(capsys, "verify", "--strict", str(file))
    assert code == 3 and "verified along 2 paths (--strict allows no paths): " in out
