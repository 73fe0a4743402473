"""What `graphguard bench engine` and `faults` measure: a proof that succeeds, of programs that are right, of all its ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import graphguard as gg
from graphguard.bench import faults
from graphguard.bench.engine import Steps, captured, case_of, main, measure, stream_of
from graphguard.bench.faults import programs
from graphguard.bench.llama import Llama
from graphguard.capture.torch.program import FunctionProgram
from graphguard.capture.torch.session import capture
from graphguard.capture.torch.subject import Subject
from graphguard.cli import main as command
from graphguard.engine.ranks.rank_classes import Stream, streams
from graphguard.errors import InternalError
from graphguard.graph.ir import Mesh, Node

SMALL = Llama(layers=1, batch=2, sequence=8, hidden=6, heads=16, groups=8, head=4, inner=8, vocab=16)
RANKS = 4


@pytest.fixture(scope="module")
def every_rank():
    """The small Llama with all of its ranks captured."""
    programs = FunctionProgram(SMALL.sequential, "sequential"), FunctionProgram(SMALL.distributed, "distributed")
    return capture(Subject(*programs, Mesh.of({"tp": RANKS}), SMALL.inputs()))


def stream_from(every_rank) -> Steps:
    chosen = (0, 1, RANKS - 1)
    return stream_of([every_rank.relations[r] for r in chosen], [every_rank.ranks[r] for r in chosen], RANKS)


def test_the_programs_agree():
    expected = {f"grads.{name}": placement for name, (_, placement) in SMALL.layout().items()}
    report = gg.verify(SMALL.sequential, SMALL.distributed, mesh={"tp": RANKS}, inputs=SMALL.inputs(), outputs=expected)
    assert report.verdict == "verified"


def test_numbers_by_steps_are_those_of_the_captured_ranks(every_rank):
    (real,) = streams(every_rank.ranks, every_rank.relations)
    made = stream_from(every_rank)
    assert made.ranks == real.ranks
    for part, graph in (("graphs", real.graphs[0]), ("relations", real.relations[0])):
        for position in range(len(graph.nodes)):
            assert words(made, part, position) == words(real, part, position)
    assert {part for part, _, _ in made.steps} == {"graphs", "relations"}


def words(stream: Stream, part: str, position: int) -> list[str]:
    args, kwargs = stream.arguments(part, position)
    return [repr(arg.tolist() if isinstance(arg, np.ndarray) else arg) for arg in (*args, *kwargs.items())]


def test_every_communication_is_matched_as_the_captured_ranks_match(every_rank):
    case = case_of(SMALL, RANKS, captured(SMALL, RANKS))
    made, real = case.joint.matches, every_rank.joint.matches
    assert [(match.op, match.group) for match in made] == [(match.op, match.group) for match in real]
    assert all(match.complete and match.nodes[rank] is match.any_node for match in made for rank in range(RANKS))


def test_numbers_without_a_step_are_refused(every_rank):
    chosen = [every_rank.ranks[r] for r in (0, 1, RANKS - 1)]
    position, node = next((n, node) for n, node in enumerate(chosen[2].nodes) if node.op == "aten.lt.Scalar")
    other = Node(node.op, (node.args[0], node.args[1] + 1), node.kwargs, node.outputs)
    nodes = [*chosen[2].nodes[:position], other, *chosen[2].nodes[position + 1 :]]
    chosen[2] = dataclasses.replace(chosen[2], nodes=nodes)
    with pytest.raises(InternalError, match="does not follow"):
        stream_of([every_rank.relations[r] for r in (0, 1, RANKS - 1)], chosen, RANKS)


def test_a_proof_that_fails_is_no_measurement():
    case = case_of(SMALL, RANKS, captured(SMALL, RANKS))
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
