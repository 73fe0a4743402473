"""Rows compute with real numbers, and torch does not: what wraps, is cut off or is a disjunction is nobody's sum."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import capture_one

import graphguard as gg
from graphguard import Shard, scope
from graphguard.audit.dtypes import examine, sample_calls
from graphguard.audit.samples import SAMPLES
from graphguard.capture.torch.relation.inputs import Input
from graphguard.engine.interpret import Interpreter
from graphguard.engine.store.table import Table
from graphguard.engine.terms.unknown import Unknown
from graphguard.errors import UsageError
from graphguard.lemmas import known
from graphguard.lemmas.dtypes import audited, in_words
from graphguard.lemmas.known import all_lemmas

TWO = {"tp": 2}


def described(program, **inputs):
    """What a program's outputs are described as, in one table: equal descriptions are proofs."""
    graph = capture_one(program, inputs)
    interpreter = Interpreter(Table(), all_lemmas())
    given = {name: interpreter.input(name, value.shape) for name, value in graph.inputs.items()}
    for name, value in given.items():
        if inputs[name].dtype == torch.bool:
            value.terms[0].factors[0].atom.indicator = True
    environment = interpreter.run_sequential(graph, given)
    return interpreter, [environment[value] for value in graph.outputs.values()]


def are_alike(one, other, **inputs):
    interpreter, (a, b) = described(lambda **given: (one(**given), other(**given)), **inputs)
    if isinstance(a, Unknown) or isinstance(b, Unknown):
        return False
    return not interpreter.ops.sub(a, b).terms


MASK, IDS = Input((4,), dtype=torch.bool), Input((4,), dtype=torch.int64)
FLOATS, BYTES, LONGS = Input((4,)), Input((4,), dtype=torch.uint8), Input((4,), dtype=torch.int64)


def count(m, i):
    return (F.one_hot(i, 3).float() * m[:, None]).sum(0)


def nothing():
    return torch.zeros(3, dtype=torch.bool)


@pytest.mark.parametrize(
    "into_booleans",
    [
        lambda m, i: nothing().index_add(0, i, m),
        lambda m, i: nothing().index_add_(0, i, m),
        lambda m, i: nothing().scatter_add(0, i, m),
        lambda m, i: nothing().scatter_reduce(0, i, m, "sum"),
        lambda m, i: nothing().index_put((i,), m, accumulate=True),
    ],
)
def test_a_sum_into_booleans_is_no_count(into_booleans):
    assert not are_alike(count, lambda m, i: into_booleans(m, i).float(), m=MASK, i=IDS)


DIFFERENT = {
    "a sum of booleans": (lambda m: m.float().sum(), lambda m: m.sum(dtype=torch.bool).float(), {"m": MASK}),
    "out= of booleans": (
        lambda m: m.float().sum(0),
        lambda m: torch.sum(m, 0, out=torch.zeros((), dtype=torch.bool)).float(),
        {"m": MASK},
    ),
    "out= of few bits": (
        lambda i: (i + i).float(),
        lambda i: torch.add(i, i, out=torch.zeros(4, dtype=torch.uint8)).float(),
        {"i": LONGS},
    ),
    "floats cut off in int8": (lambda x: x.long(), lambda x: x.to(torch.int8).long(), {"x": FLOATS}),
    "floats cut off in uint8": (lambda x: x.long().float(), lambda x: x.to(torch.uint8).float(), {"x": FLOATS}),
    "another way into int8": (lambda x: x.to(torch.int8).long(), lambda x: x.long().to(torch.int8).long(), {"x": FLOATS}),
    "a sum of few bits": (lambda u: u.long() + u.long(), lambda u: (u + u).long(), {"u": BYTES}),
    "a difference of few bits": (lambda u: u.long() - 1, lambda u: (u - 1).long(), {"u": BYTES}),
    "a sum in few bits": (lambda u: u.long().sum(), lambda u: u.sum(dtype=torch.uint8).long(), {"u": BYTES}),
    "a sum so far in few bits": (lambda u: u.cumsum(0), lambda u: u.cumsum(0, dtype=torch.int8).long(), {"u": BYTES}),
    "a number that wraps": (lambda u: u.long() < 300, lambda u: u < 300, {"u": BYTES}),
    "a negative number among bytes": (lambda u: u.long() == -1, lambda u: u == -1, {"u": BYTES}),
    "floats into integers": (
        lambda i, x: torch.cat([x[:2], i[2:].float()]),
        lambda i, x: i.slice_scatter(x[:2], 0, 0, 2).float(),
        {"i": LONGS, "x": FLOATS},
    ),
    "one float into integers": (
        lambda i, x: torch.cat([x[:1], i[1:].float()]),
        lambda i, x: i.select_scatter(x[0], 0, 0).float(),
        {"i": LONGS, "x": FLOATS},
    ),
    "an integer beta given as a float": (
        lambda i: 2.5 * i[:, None].float() + (i[:, None] @ i[None, :1]).float(),
        lambda i: torch.addmm(i[:, None], i[:, None], i[None, :1], beta=2.5).float(),
        {"i": LONGS},
    ),
    "whole powers below one": (
        lambda i, j: torch.pow(i.float(), j.float()),
        lambda i, j: torch.pow(i, j).float(),
        {"i": LONGS, "j": LONGS},
    ),
    "the bits of two dtypes": (
        lambda x: x.bfloat16().view(torch.int16),
        lambda x: x.half().view(torch.int16),
        {"x": FLOATS},
    ),
    "the bits of a rounded number": (
        lambda x: x.view(torch.int32),
        lambda x: x.bfloat16().float().view(torch.int32),
        {"x": FLOATS},
    ),
    "the sign of a zero": (lambda x: torch.signbit(-x), lambda x: torch.signbit(0 - x), {"x": FLOATS}),
    "the next number of another dtype": (
        lambda x: torch.nextafter(x, x + 1),
        lambda x: torch.nextafter(x.double(), x.double() + 1).float(),
        {"x": FLOATS},
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_dtypes_tell_apart_is_not_proved_equal(name):
    one, other, inputs = DIFFERENT[name]
    assert not are_alike(one, other, **inputs)


ALIKE = {
    "booleans as floats and back": (lambda m: m.long(), lambda m: m.float().to(torch.uint8).long(), {"m": MASK}),
    "bytes in more bits": (lambda u: u.long(), lambda u: u.to(torch.int16).long(), {"u": BYTES}),
    "bytes that are moved": (lambda u: u.flip(0).long(), lambda u: u.long().flip(0), {"u": BYTES}),
    "the same cast": (lambda x: x.to(torch.int8), lambda x: (x * 1).to(torch.int8), {"x": FLOATS}),
    "whole numbers": (lambda i: (i + i).sum(), lambda i: 2 * i.sum(), {"i": LONGS}),
    "a count": (lambda m: m.sum(), lambda m: m.long().sum(), {"m": MASK}),
    "integers among floats": (lambda i, x: i + x, lambda i, x: x + i.float(), {"i": LONGS, "x": FLOATS}),
    "the bits of integers": (lambda i: i.view(torch.uint8), lambda i: (i + 0).view(torch.uint8), {"i": LONGS}),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_dtypes_do_not_tell_apart_is_still_equal(name):
    one, other, inputs = ALIKE[name]
    assert are_alike(one, other, **inputs)


# ---------------------------------------------------------------------- the ranks
def summed(x):
    y = x.clone()
    dist.all_reduce(y)
    return y.long()


def test_a_reduction_of_bytes_wraps_around():
    inputs = {"x": gg.Input((4, 3), Shard(0), torch.uint8, low=0, high=256)}
    report = gg.verify(lambda x: x.view(2, 2, 3).long().sum(0), summed, mesh=2, inputs=inputs)
    assert report.verdict == "refuted"
    wide = {"x": gg.Input((4, 3), Shard(0), torch.int64, low=0, high=256)}
    assert gg.verify(lambda x: x.view(2, 2, 3).sum(0), summed, mesh=2, inputs=wide).verdict == "verified"


# ---------------------------------------------------------------------- the guard
def test_a_row_is_not_asked_about_dtypes_for_which_it_is_not_audited(monkeypatch):
    interpreter, _ = described(lambda u: u + u, u=BYTES)
    ((node, reason),) = interpreter.fallbacks
    assert node.op == "aten.add.Tensor"
    assert reason == "aten.add.Tensor, narrow whole numbers to narrow whole numbers, for which its lemma is not audited"
    with known.unguarded():
        assert not described(lambda u: u + u, u=BYTES)[0].fallbacks


def test_signatures_are_told_in_words():
    assert in_words("wf>f") == "whole numbers, floats to floats"
    assert in_words("out:f>b") == "floats to booleans written to out="


def test_every_row_but_random_ones_is_audited_for_something():
    rows = {row.operator for row in known.rows() if not row.draws}
    assert rows == audited().keys()
    assert all("f>f" in audited()[f"aten.{name}.default"] for name in ("mm", "exp", "clone", "_softmax"))


PORTIONS = 8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("portion", range(PORTIONS))
def test_rows_are_right_in_the_dtypes_for_which_they_answer(portion):
    torch.set_num_threads(1)
    samples = list(SAMPLES.values())[portion::PORTIONS]
    found = examine(sample_calls(samples), turns=1, seed=portion)
    assert found.wrong == {}
    assert sum(sum(counts.values()) for counts in found.right.values()) > 30 * len(samples)


def test_a_row_that_is_wrong_for_a_class_is_not_listed_for_it():
    calls = list(sample_calls([SAMPLES["index_select"]]))
    with known.unguarded():
        found = examine(calls)
    assert "bwb>b" in found.wrong["aten.index_add.default"]
    assert "bwb>b" not in found.covered()["aten.index_add.default"] and "fwf>f" in found.covered()["aten.index_add.default"]


# ---------------------------------------------------------------------- lemmas of the user's
@torch.library.custom_op("gg_dtypes::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * (3 if x.dtype == torch.float16 else 2)


@torch.library.custom_op("gg_dtypes::norm", mutates_args=())
def norm(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


for each in (twice, norm):
    each.register_fake(lambda x: torch.empty_like(x))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(scope, "_OF_PROCESS", {})


def doubled(x):
    return twice(x).float()


@pytest.mark.parametrize("meaning", [lambda x: 2 * x, "... -> ..."])
def test_a_lemma_is_used_in_dtypes_in_which_it_held(meaning):
    lemma = gg.lemma("gg_dtypes::twice", meaning)
    assert ("float32",) in lemma.dtypes and ("bfloat16",) in lemma.dtypes
    assert (("float16",) in lemma.dtypes) == isinstance(meaning, str)


def test_a_definition_that_is_wrong_for_one_dtype_proves_nothing_there():
    lemma = gg.lemma("gg_dtypes::twice", lambda x: 2 * x)

    def verdict(dtype):
        inputs = {"x": gg.Input((4, 2), dtype=dtype)}
        return gg.verify(lambda x: (2 * x).float(), doubled, mesh=TWO, inputs=inputs, lemmas=[lemma]).verdict

    assert [verdict(torch.float32), verdict(torch.bfloat16)] == ["verified", "verified"]
    assert verdict(torch.float16) != "verified"


def test_a_definition_that_casts_as_its_operator_does_is_not_refused():
    def plain(x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    lemma = gg.lemma("gg_dtypes::norm", plain)
    assert {("float64",), ("float32",), ("bfloat16",), ("float16",)} <= lemma.dtypes
    with pytest.raises(UsageError, match="is refused: on operands of shape"):
        gg.lemma("gg_dtypes::norm", lambda x: plain(x) * 1.001)


def test_one_whole_number_is_cast_to_the_few_bits_beside_it_wherever_it_stands():
    """-2 is 254 there, which is not below 2."""
    inputs = {"one": gg.Input((), dtype=torch.int64), "many": gg.Input((4,), dtype=torch.uint8)}
    for wide, narrow in ((lambda a, b: a.expand(4) >= b, torch.ge), (lambda a, b: b < a.expand(4), lambda a, b: b < a)):
        report = gg.verify(lambda one, many: wide(one, many.long()), lambda one, many: narrow(one, many), mesh=2, inputs=inputs)
        assert report.verdict == "refuted"
