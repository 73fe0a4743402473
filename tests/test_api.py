"""`gg.verify` around the prover: what it is given, what its answer becomes, and what is refused before it is asked."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import signal

import pytest
import torch
import torch.distributed as dist
from harness import python
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphguard as gg
from graphguard import Partial, Replicate, Shard
from graphguard.engine.proof import Proof, Relation
from graphguard.errors import CaptureError, GraphGuardError, InternalError, ProgramError, UsageError
from graphguard.graph.findings import KINDS, Finding
from graphguard.graph.ir import Source
from graphguard.graph.placement import REPLICATE, SUM, parse
from graphguard.oracle.replay import replay
from graphguard.pipeline import collecting
from graphguard.relation.expectation import FULL, LOCAL
from graphguard.report.report import NotVerifiedError, Report
from graphguard.testing import assert_refines
from graphguard.verdict.judge import Judgement
from graphguard.verdict.verdict import REAL_ARITHMETIC

FILE = os.path.relpath(__file__)
HERE = Source(os.path.abspath(__file__), 7)
THERE = Source(os.path.abspath(__file__), 9)
EQUAL = Relation("out", "out = rank0.out   (equal on all 2 ranks)", (("tp", "Replicate"),), "f32[4, 3]")
LOST = Finding("relation-lost", "no clean expression covers mm", sequential=HERE, distributed=THERE, phase="backward")


class FakeProver:
    """In the place of the prover: remembers what it is asked, and answers as it is told. The oracle finds no difference."""

    def __init__(self):
        self.answer = Proof({"out": EQUAL}, seconds=0.25)
        self.calls = 0

    def prove(self, sequential, world, *, expected, ranges, lemmas, limits, are_wrong=None):
        self.calls += 1
        self.sequential, self.world = sequential, world
        pairs = [next(each.at(rank) for each in world.classes if rank in each.members) for rank in range(world.mesh.size)]
        self.relations, self.ranks = map(list, zip(*pairs, strict=True))
        self.expected, self.ranges = expected, ranges
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def prover(monkeypatch):
    fake = FakeProver()
    monkeypatch.setattr("graphguard.pipeline.prove", fake.prove)
    monkeypatch.setattr("graphguard.pipeline.judge", lambda *graphs, **options: Judgement(trials=3, seconds=0.125))
    return fake


def seq(x, w):
    return x @ w


def par(x, w):
    y = x @ w
    dist.all_reduce(y)
    return y


def races(x, w):
    y = x @ w
    work = dist.all_reduce(y, async_op=True)
    z = y + 1
    work.wait()
    return z


INPUTS = {"x": gg.Input((4, 6), Shard(1)), "w": gg.Input((6, 3), Shard(0))}
MESH = {"tp": 2}


def verify(sequential=seq, distributed=par, mesh=MESH, inputs=INPUTS, **options):
    return gg.verify(sequential, distributed, mesh=mesh, inputs=inputs, **options)


# ---------------------------------------------------------------------- verdicts
def test_what_is_proved_is_verified(prover):
    report = verify()
    assert report.verdict == "verified" and report.verified and report.findings == [] and report.counterexample is None
    assert str(report.relation) == EQUAL.text and report.relation["out"].placements == (("tp", "Replicate"),)
    report.raise_if_not_verified()


def test_what_is_not_proved_is_unproven(prover):
    prover.answer = Proof({}, [LOST], opaque=["mylib.norm.default"])
    report = verify()
    assert report.verdict == "unproven" and report.findings == [LOST] and not report.verified
    with pytest.raises(NotVerifiedError) as caught:
        report.raise_if_not_verified()
    assert caught.value.report is report and str(caught.value) == str(report) and isinstance(caught.value, GraphGuardError)


def test_ranks_that_do_not_fit_together_are_refuted_without_a_proof(prover):
    report = verify(distributed=races)
    assert report.verdict == "refuted" and prover.calls == 0
    (finding,) = report.findings  # though both ranks show it
    assert (
        finding.kind == "race"
        and finding.ranks == (0, 1)
        and finding.sequential is None
        and finding.distributed == finding.sources[0]
    )
    assert report.stats["seconds"]["proof"] is None and not report.relation


def test_the_prover_is_given_graphs_relations_and_ranges(prover):
    inputs = {
        "x": gg.Input((4, 6), Shard(1), low=0.5, high=2),
        "i": gg.Input((4,), dtype=torch.int64, low=0, high=9.5),
        "j": gg.Input((4,), dtype=torch.int32, high=5),
        "k": gg.Input((4,), dtype=torch.int64),
    }
    verify(lambda x, i, j, k: x, lambda x, i, j, k: x, inputs=inputs)
    assert prover.ranges == {"x": (0.5, 2), "i": (0, 10), "j": (None, 5)}
    assert list(prover.sequential.inputs) == list(inputs) and len(prover.ranks) == len(prover.relations) == 2
    assert prover.expected == {}


def test_a_defect_of_the_prover_is_an_error_not_a_verdict(prover):
    prover.answer = ZeroDivisionError("division by zero")
    with pytest.raises(InternalError, match=r"^ZeroDivisionError in GraphGuard itself: division by zero; please report it$"):
        verify()


class Slow(Exception):
    """A limit of the user's."""


def test_a_limit_of_time_of_the_user_is_no_defect(prover, monkeypatch):
    def stop(number, frame):
        raise Slow("too slow")

    class Stopped:
        def __call__(self, *args, **kwargs):
            signal.raise_signal(signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, stop)
    try:
        monkeypatch.setattr("graphguard.pipeline.prove", Stopped())
        with pytest.raises(Slow, match="too slow"):
            verify()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_where_checks_are_collected_nothing_runs(prover):
    with collecting() as jobs:
        verify()
        assert_refines(seq, par, mesh=MESH, inputs=INPUTS)
    assert len(jobs) == 2 and prover.calls == 0


def test_what_is_no_lemma_is_refused(prover):
    with pytest.raises(UsageError, match=r"lemmas= has object; write lemmas=\[gg.lemma\(name, rule\)\]"):
        verify(lemmas=[object()])


# ---------------------------------------------------------------------- reports
def test_a_report_prints_the_verdict_first(prover):
    prover.answer.assumptions = ["the values of i are in [0, 9)"]
    report = verify()
    report.stats["seconds"].update(capture=0.5)
    assert str(report).splitlines() == [
        "verified",
        "  out = rank0.out   (equal on all 2 ranks)",
        "  assumed: real arithmetic: numbers are not rounded and do not overflow",
        "  assumed: the values of i are in [0, 9)",
        "  7 operations on 2 ranks; capture 0.50 s, proof 0.25 s, oracle 0.12 s",
    ]


def test_a_report_is_json(prover):
    prover.answer = Proof({"out": EQUAL}, [LOST], ["assumed"])
    report = verify()
    plain = json.loads(report.to_json())
    assert plain["version"] == 1 and plain["verdict"] == "unproven" and plain["counterexample"] is None
    assert plain["relation"] == {
        "out": {"text": EQUAL.text, "placements": {"tp": "Replicate"}, "type": "f32[4, 3]", "note": None}
    }
    (finding,) = plain["findings"]
    assert finding["code"] == "GG201" and finding["kind"] == "relation-lost" and finding["phase"] == "backward"
    assert (finding["sequential"], finding["distributed"], finding["repair"]) == (f"{FILE}:7", f"{FILE}:9", None)
    assert plain["assumptions"] == [REAL_ARITHMETIC, "assumed"] and plain["stats"] == report.stats
    assert plain["stats"]["ops"] == 7 and plain["stats"]["ranks"] == 2 and set(plain["stats"]["seconds"]) == {
        "capture", "proof", "oracle",
    }  # fmt: skip


def test_notes_say_what_is_worth_a_look(prover):
    prover.answer = Proof({"out": Relation("out", "out = sum(rank0.out, rank1.out)", note="a sum over ranks")})
    report = verify(lambda x, w: {"out": x @ w, "z": None}, lambda x, w: {"out": x @ w, "extra": x, "z": x})
    assert report.notes == [
        "a sum over ranks",
        "extra: only ranks return it, so nothing is claimed of it",
        "z: only ranks return it, so nothing is claimed of it",
    ]
    assert f"note: {report.notes[0]}" in report.lines() and report.verdict == "verified"


def test_the_error_of_a_report_survives_pickling():
    error = NotVerifiedError(Report("unproven", findings=[LOST]))
    again = pickle.loads(pickle.dumps(error))
    assert again.report == error.report and str(again) == str(error)


# ---------------------------------------------------------------------- findings
def test_every_kind_has_its_code_and_its_meaning():
    assert [kind.code for kind in KINDS.values()] == sorted({kind.code for kind in KINDS.values()})
    assert {name: KINDS[name].code for name in KINDS if KINDS[name].code >= "GG2"} == {
        "relation-lost": "GG201", "unexplained-output": "GG202", "scaled-copies": "GG203", "missing-output": "GG204",
        "unexpected-relation": "GG205", "undefined-value": "GG206",
    }  # fmt: skip
    assert all(kind.meaning.endswith(".") for kind in KINDS.values())


def test_a_finding_needs_a_kind_and_a_message_only():
    finding = Finding("missing-output", "no rank returns 'loss'")
    assert (finding.ranks, finding.sources, finding.sequential, finding.distributed) == ((), (), None, None)
    assert finding.phase is None and finding.repair is None and finding.code == "GG204"
    with pytest.raises(ValueError, match="unknown kind of finding 'gremlin'"):
        Finding("gremlin", "")
    with pytest.raises(ValueError, match="unknown phase 'sideways'"):
        Finding("race", "", phase="sideways")


def test_only_faults_of_communication_are_located_by_their_first_line():
    assert Finding("race", "", sources=(HERE, THERE)).distributed == HERE
    assert Finding("unexplained-output", "", sources=(HERE,)).distributed is None


# ---------------------------------------------------------------------- expected outputs
PLACED = [
    ({"tp": 2}, Shard(1), ("Shard(1)",), "Shard(1)"),
    ({"tp": 2}, Shard(-1), ("Shard(1)",), "Shard(1)"),
    ({"tp": 2}, {"tp": Partial("avg")}, ("Partial(avg)",), "Partial(avg)"),
    (2, [Replicate()], ("Replicate",), "Replicate"),
    ({"dp": 2, "tp": 1}, Replicate(), ("Replicate", "Replicate"), "{dp: Replicate, tp: Replicate}"),
    ({"dp": 2, "tp": 1}, {"tp": Partial()}, ("Replicate", "Partial(sum)"), "{dp: Replicate, tp: Partial(sum)}"),
    ({"dp": 2, "tp": 1}, (Shard(0), Partial("max")), ("Shard(0)", "Partial(max)"), "{dp: Shard(0), tp: Partial(max)}"),
]


@pytest.mark.parametrize(("mesh", "stated", "placements", "text"), PLACED)
def test_expected_placements_are_one_per_axis(prover, mesh, stated, placements, text):
    verify(lambda x: x, lambda x: x, mesh, {"x": gg.Input((4, 6))}, outputs={"out": stated})
    (expected,) = prover.expected.values()
    assert (expected.placements, expected.graphs, expected.text) == (parse(placements), None, text)


def test_an_expected_layout_in_code_is_a_graph_per_rank(prover):
    def pairs(full, coord):
        return torch.cat([full[coord["tp"]], full[coord["tp"] + 2]])

    verify(lambda x: {"a": x, "b": x}, lambda x: {"a": x, "b": x}, inputs={"x": gg.Input((4, 6))},
           outputs={"b": Replicate(), "a": pairs})  # fmt: skip
    assert list(prover.expected) == ["b", "a"]
    expected = prover.expected["a"]
    assert expected.placements is None and expected.text == "the layout of pairs" and len(expected.graphs) == 2
    full = torch.randn(4, 6)
    for rank, graph in enumerate(expected.graphs):
        assert list(graph.inputs) == [FULL] and list(graph.outputs) == [LOCAL] and graph.rank == rank
        assert torch.equal(replay(graph, {FULL: full})[LOCAL], pairs(full, {"tp": rank}))


def test_a_layout_in_code_speaks_of_the_ranks_that_return_the_output(prover):
    def only_last(full, coord):
        assert coord["tp"] == 1
        return full

    verify(lambda x: x, lambda x: x if dist.get_rank() else None, inputs={"x": gg.Input((4,))}, outputs={"out": only_last})
    first, last = prover.expected["out"].graphs
    assert first is None and last.outputs[LOCAL] is last.inputs[FULL]


BAD = {
    "outputs= names 'loss', which the sequential program does not return; it returns ['out']": {"loss": Replicate()},
    "outputs=: output 'out' is placed on the axis 'dp'; the mesh has ['tp']": {"out": {"dp": Shard(0)}},
    "outputs=: output 'out' has 3 on axis 'tp'; use Replicate(), Shard(dim) or Partial()": {"out": 3},
    "outputs=: output 'out' has 2 placements for 1 mesh axes": {"out": (Shard(0), Shard(1))},
    "outputs=: output 'out': Shard(2) names a dim that its shape (4, 3) does not have": {"out": Shard(2)},
    "outputs=: output 'out': Partial('product') is none of sum, avg, max, min": {"out": Partial("product")},
    "outputs=: the function of 'out' returned int, not a tensor": {"out": lambda full, coord: 3},
    "outputs= is list; write {path: placement}": [Replicate()],
}


@pytest.mark.parametrize("text", BAD)
def test_bad_expectations_are_one_sentence(prover, text):
    with pytest.raises(UsageError) as caught:
        verify(outputs=BAD[text])
    assert str(caught.value) == text and prover.calls == 0


def test_a_class_in_the_place_of_a_placement_is_refused(prover):
    with pytest.raises(UsageError, match=r"use Replicate\(\), Shard\(dim\) or Partial\(\)$"):
        verify(outputs={"out": Replicate})


def test_an_output_that_is_none_is_not_one(prover):
    with pytest.raises(UsageError, match=r"outputs= names 'b', .* it returns \['a'\]"):
        verify(lambda x, w: {"a": x, "b": None}, lambda x, w: {"a": x, "b": x}, outputs={"b": Replicate()})


def test_errors_of_expected_layouts_speak_of_outputs(prover):
    def fails(full, coord):
        raise ValueError("no luck")

    with pytest.raises(ProgramError, match=r"^outputs= for rank 0 raised ValueError at .* in fails: no luck$") as caught:
        verify(outputs={"out": fails})
    assert [function for _, _, function in caught.value.frames] == ["fails"]
    with pytest.raises(CaptureError, match=r"^outputs= for rank 0: .*reads the value of a tensor"):
        verify(outputs={"out": lambda full, coord: full * full.sum().item()})


def test_expectations_and_reports_need_no_torch():
    modules = "graphguard.relation.expectation, graphguard.report.report, graphguard.checks.check"
    assert python(f"import sys, {modules}; print('torch' in sys.modules)") == "False\n"


# ---------------------------------------------------------------------- in tests
def test_assert_refines_returns_the_report_of_what_is_verified(prover):
    assert assert_refines(seq, par, mesh=MESH, inputs=INPUTS).verdict == "verified"


def test_assert_refines_fails_with_the_report_below_a_short_sentence(prover):
    prover.answer = Proof({}, [LOST])
    with pytest.raises(AssertionError) as caught:
        assert_refines(seq, par, mesh=MESH, inputs=INPUTS)
    first, empty, *report = str(caught.value).splitlines()
    assert first == f"unproven: GG201 at {THERE}: no clean expression covers mm; par is not verified to refine seq"
    assert empty == "" and report[0] == "unproven"
    assert "GG201 relation-lost" in report[1]
    assert caught.traceback[-1].frame.f_locals["__tracebackhide__"]


def test_assert_refines_leaves_the_verdict_as_a_property(prover):
    seen = []
    assert_refines(seq, par, mesh=MESH, inputs=INPUTS, record_property=lambda name, value: seen.append((name, value)))
    assert seen == [("graphguard.par", "verified")]


def test_assert_refines_takes_what_verify_takes():
    assert list(inspect.signature(gg.verify).parameters)[:2] == list(inspect.signature(assert_refines).parameters)[:2]


# ---------------------------------------------------------------------- modules
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def parallelize(mesh):
    return parallelize_module(Net(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def loss_fn(model, x):
    return model(x).pow(2).sum()


class Half(nn.Module):
    """A tensor-parallel layer without marks."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    forward = Net.forward


class Third(Half):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 3), nn.Linear(3, 4)


X = {"x": gg.Input((6, 4))}


def verify_model(distributed, mesh=MESH, inputs=X, **options):
    return gg.verify_model(Net, distributed, mesh=mesh, inputs=inputs, **options)


def replayed(relations, full):
    return [replay(relation, full) for relation in relations]


def test_parameters_are_related_by_their_dtensor_layouts(prover):
    assert verify_model(parallelize).verdict == "verified"
    full = {name: torch.randn(value.shape) for name, value in prover.sequential.inputs.items()}
    for rank, given in enumerate(replayed(prover.relations, full)):
        assert list(given) == list(prover.ranks[rank].inputs)
        assert torch.equal(given["x"], full["x"])
        assert torch.equal(given["params.up.weight"], full["params.up.weight"].chunk(2)[rank])
        assert torch.equal(given["params.down.weight"], full["params.down.weight"].chunk(2, 1)[rank])
        assert torch.equal(given["params.down.bias"], full["params.down.bias"])


def test_strided_layouts_are_read_as_dtensor_reads_them(prover):
    """FSDP over a tensor-parallel module: the inner split comes first."""
    from torch.distributed.fsdp import fully_shard

    def shard(mesh):
        net = parallelize_module(Net(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(net, mesh=mesh["dp"])

    report = verify_model(shard, {"dp": 2, "tp": 2})
    assert report.parameters["up.weight"] == "_StridedShard(dim=0, sf=2), Shard(dim=0), by its DTensor placements"
    weight = torch.arange(32.0).reshape(8, 4)
    full = {name: torch.zeros(value.shape) for name, value in prover.sequential.inputs.items()} | {"params.up.weight": weight}
    for rank, given in enumerate(replayed(prover.relations, full)):
        data, tensor = divmod(rank, 2)
        assert torch.equal(given["params.up.weight"], weight.chunk(2)[tensor].chunk(2)[data])


def test_parameters_of_equal_shape_are_replicated_and_so_are_their_gradients(prover):
    verify_model(lambda mesh: Net(), {"dp": 2}, {"x": gg.Input((6, 4), Shard(0))},
                 step=gg.train_step(loss_fn, loss={"dp": Partial()}), outputs={"grads.down.bias": Partial()})  # fmt: skip
    assert {path: expected.placements for path, expected in prover.expected.items()} == {
        "grads.up.weight": (REPLICATE,), "grads.up.bias": (REPLICATE,), "grads.down.weight": (REPLICATE,),
        "grads.down.bias": (SUM,), "loss": (SUM,),
    }  # fmt: skip


def test_dtensor_gradients_stand_for_their_full_tensors(prover):
    verify_model(parallelize, step=gg.train_step(loss_fn))
    assert {path: expected.text for path, expected in prover.expected.items()} == {
        "grads.up.weight": "Shard(0)", "grads.up.bias": "Shard(0)",
        "grads.down.weight": "Shard(1)", "grads.down.bias": "Replicate",
    }  # fmt: skip


def test_stated_parameters_override(prover):
    verify_model(
        lambda mesh: Half(),
        params={"up.*": Shard(0), "down.weight": lambda full, coord: full.chunk(2, 1)[coord["tp"]]},
        step=gg.train_step(loss_fn),
    )
    full = {name: torch.randn(value.shape) for name, value in prover.sequential.inputs.items()}
    for rank, given in enumerate(replayed(prover.relations, full)):
        assert torch.equal(given["params.up.bias"], full["params.up.bias"].chunk(2)[rank])
        assert torch.equal(given["params.down.weight"], full["params.down.weight"].chunk(2, 1)[rank])
    assert prover.expected["grads.up.weight"].placements == parse(["Shard(0)"])
    assert prover.expected["grads.down.weight"].graphs is not None


def test_parameters_stand_beside_local_inputs(prover):
    verify_model(
        parallelize, local_inputs=lambda full, coord: {"x": full["x"] * (1 + coord["tp"])}, params={"down.bias": Replicate()}
    )
    full = {name: torch.randn(value.shape) for name, value in prover.sequential.inputs.items()}
    second = replayed(prover.relations, full)[1]
    assert torch.equal(second["x"], full["x"] * 2)
    assert torch.equal(second["params.up.bias"], full["params.up.bias"].chunk(2)[1])


class Stage(nn.Module):
    """A pipeline stage: it has its own parameters only."""

    def __init__(self, rank):
        super().__init__()
        self.add_module("up" if rank == 0 else "down", nn.Linear(*((4, 8) if rank == 0 else (8, 4))))

    def forward(self, x):
        return self.up(x) if hasattr(self, "up") else self.down(x.new_zeros(6, 8))


def test_ranks_have_the_parameters_that_they_have(prover):
    verify_model(lambda mesh: Stage(dist.get_rank()), {"pp": 2})
    assert [list(relation.outputs) for relation in prover.relations] == [
        ["x", "params.up.weight", "params.up.bias"], ["x", "params.down.weight", "params.down.bias"],
    ]  # fmt: skip


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(4, 4)

    def forward(self, x):
        return self.other(x)


class Summed(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        weight = DTensor.from_local(torch.zeros(8, 4), mesh["tp"], [Partial()])
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.up.weight = nn.Parameter(weight)

    def forward(self, x):
        return self.down(torch.relu(x @ self.up.weight.to_local().T))


WRONG = {"up.weight": Shard(1), "up.bias": Shard(0), "down.*": lambda full, coord: full[..., :4]}
UNKNOWN = {
    "'up.weight' is unknown: it has shape (8, 4), and (3, 4) on rank 0; state it in params=": (lambda mesh: Third(), "auto"),
    "'up.weight' is unknown: rank 0 has f32[4, 4], and its part of the sequential one is f32[8, 2]": (
        lambda mesh: Half(), WRONG,
    ),
    "'other.weight' is unknown: rank 0 has it, and the sequential module has no parameter of that name; "
    "params={name: fn(all_params, coord)} says what it is made of": (
        lambda mesh: Renamed(), "auto",
    ),
    "'up.weight' is unknown: it is placed by Partial(sum)": (Summed, "auto"),
}  # fmt: skip


@pytest.mark.parametrize("text", UNKNOWN)
def test_a_parameter_whose_relation_is_unknown_is_an_error(prover, text):
    build, params = UNKNOWN[text]
    with pytest.raises(GraphGuardError) as caught:
        verify_model(build, params=params)
    assert str(caught.value) == f"the relation of the parameter {text}" and prover.calls == 0


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (3, "params= is 3; write 'auto', or {pattern: placement}"),
        ({"norm.*": Shard(0)}, "params= names 'norm.*', which no parameter of the sequential module matches"),
    ],
)
def test_bad_params_are_one_sentence(prover, params, text):
    with pytest.raises(UsageError) as caught:
        verify_model(parallelize, params=params)
    assert str(caught.value) == text


def test_distributed_tensors_made_by_hand_are_read_too(prover):
    def build(mesh):
        net = Net()
        net.up.weight = nn.Parameter(distribute_tensor(net.up.weight.detach(), mesh["tp"], [Shard(0)]))
        return net

    verify_model(build, step=lambda model, x: x)
    assert prover.relations[1].outputs["params.up.weight"].shape == (4, 4)
