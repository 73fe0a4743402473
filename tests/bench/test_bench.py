"""What `graphguard bench engine` and `faults` measure: a proof that succeeds, of programs that are right, of all its ranks."""

from __future__ import annotations

import pytest

import graphguard as gg
from graphguard.bench import faults
from graphguard.bench.engine import case_of, main, measure
from graphguard.bench.faults import programs
from graphguard.bench.llama import Llama
from graphguard.cli import main as command
from graphguard.errors import InternalError

SMALL = Llama(layers=1, batch=2, sequence=8, hidden=6, heads=16, groups=8, head=4, inner=8, vocab=16)
RANKS = 4


def test_the_programs_agree():
    expected = {f"grads.{name}": placement for name, (_, placement) in SMALL.layout().items()}
    report = gg.verify(SMALL.sequential, SMALL.distributed, mesh={"tp": RANKS}, inputs=SMALL.inputs(), outputs=expected)
    assert report.verdict == "verified"


def test_a_proof_that_fails_is_no_measurement():
    case = case_of(SMALL, RANKS)
    case.expected["grads.query0"] = case.expected["loss"]
    with pytest.raises(InternalError, match=r"not proved: .*query0"):
        measure(case)


def test_what_is_printed(capfd):
    main(layers=(1, 2), lanes=(8, 1024), repeats=1)
    printed = capfd.readouterr().out
    assert "µs per operation at 8 lanes (target: at most 100); 1024 lanes take" in printed
    assert "an operation among 2 layers takes" in printed


def test_a_benchmark_that_does_not_exist(capsys):
    with pytest.raises(SystemExit) as stopped:
        command(["bench", "nothing"])
    assert stopped.value.code == 2
    assert "there are: capture, engine, faults" in capsys.readouterr().err


def test_faults_are_refuted_and_the_right_program_is_verified():
    rows = dict(programs(2, splits_sequence=True))
    assert [name for name in rows if name.startswith("missing sum")] == ["missing sum, layer 0", "missing sum, layer 1"]
    assert faults.measure(rows["none"], 2).total > 0
    assert faults.measure(rows["missing sum, layer 1"], 2).total > 0
