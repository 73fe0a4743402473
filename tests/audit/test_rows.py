"""The lemma audit finds rows that are wrong, wrong for shards alone, or stronger than need be; and its command says so."""

import random

import pytest
import torch

from graphguard import scope
from graphguard.audit.rows import audit, rows_named
from graphguard.audit.samples import SAMPLES
from graphguard.audit.samples.sample import N, Sample, X
from graphguard.audit.shards import Example
from graphguard.audit.table import audit_rows
from graphguard.cli import main
from graphguard.errors import UsageError
from graphguard.lemmas import known, registry

SINE = Sample("sine", lambda x: x.sin().exp(), {"x": X(6, 4)})


@pytest.fixture
def replaced(monkeypatch):
    """Replaces what a row says."""
    known.rows()

    def replace(operator, describe):
        row = registry.Row(operator, "arithmetic", "something else", "", describe)
        monkeypatch.setitem(registry.ROWS, operator, row)

    return replace


def test_a_wrong_row_is_found_and_nobody_else_is_blamed(replaced):
    assert not any(line.wrong for line in audit([SINE]).values())
    replaced("aten.sin.default", lambda c, x: c.fn("cos", x))
    ledger = audit([SINE])
    assert ledger["aten.sin.default"].wrong and not ledger["aten.exp.default"].wrong
    first = ledger["aten.sin.default"].wrong[0]
    assert first.startswith("sine, whole: ") and "is described as" in first


def test_a_row_that_is_wrong_for_shards_alone_is_found(replaced):
    replaced("aten.sin.default", lambda c, x: c.fn("sin" if c.size(x, 0) == 6 else "cos", x))
    wrong = audit([SINE])["aten.sin.default"].wrong
    assert wrong and all(text.startswith("sine, lane ") and "x along dim 0" in text for text in wrong)


def test_a_row_that_raises_is_wrong(replaced):
    replaced("aten.sin.default", lambda c, x: {}["x"])
    assert "its description raises KeyError: 'x'" in audit([SINE])["aten.sin.default"].wrong[0]


def test_a_row_that_needs_more_than_the_operator_could_be_weaker(replaced):
    assert not any(line.weaker for line in audit([SINE]).values())
    replaced("aten.sin.default", lambda c, x: c.opaque("sin", [x], 0, c.shape))
    line = audit([SINE])["aten.sin.default"]
    assert not line.wrong
    assert any("the shards' results, joined, are the whole one; its description does not show that" in w for w in line.weaker)


def test_an_operator_that_needs_its_dim_whole_is_not_called_too_strong():
    ledger = audit([SAMPLES[name] for name in ("orders", "cumulative", "softmax", "some_and_all")], examples=2)
    assert [text for line in ledger.values() for text in line.weaker] == []


def test_a_sum_over_shards_should_be_shown_too(replaced):
    total = Sample("total", lambda x: x.sum(0), {"x": X(6, 4)})
    assert not any(line.weaker for line in audit([total]).values())
    replaced("aten.sum.dim_IntList", lambda c, x, dims, *_: c.opaque("sum", [x], 0, c.shape))
    weaker = audit([total])["aten.sum.dim_IntList"].weaker
    assert any("the shards' results add up to the whole one" in text for text in weaker)


# ---------------------------------------------------------------------- examples
def test_examples_have_random_sizes_and_shards_that_the_seed_decides():
    mm = SAMPLES["mm"]
    shapes = [Example(mm, 0, number).sample.inputs["a"].shape for number in range(6)]
    assert shapes[0] == (6, 4) and len(set(shapes)) > 2
    once, again, other = (Example(mm, seed, 1) for seed in (3, 3, 4))
    assert torch.equal(once.full["a"], again.full["a"]) and once.cuts == again.cuts
    assert once.cuts != other.cuts
    cuts = [cut for number in range(6) for cut in Example(mm, 0, number).cuts]
    assert {cut.tiles for cut in cuts} == {True, False}


def test_a_sample_that_does_not_take_other_sizes_keeps_its_own():
    fixed = Sample("fixed", lambda x: x.view(3, 8), {"x": X(6, 4)})
    assert all(Example(fixed, 0, number).full["x"].numel() == 24 for number in range(4))


def test_windows_lie_inside_and_have_one_size():
    example = Example(Sample("ids", lambda i: i + 1, {"i": N(7)}), 0, 0)
    example.dice = random.Random(1)
    for _ in range(50):
        cut = example._windows({"i": 0}, 3)
        starts, size = cut.windows["i"]
        assert len(starts) == 3 and 1 <= size <= 7 and all(0 <= start <= 7 - size for start in starts)
        assert cut.local(example.full, 2)["i"].tolist() == example.full["i"][starts[2] : starts[2] + size].tolist()


# ---------------------------------------------------------------------- names
def test_names_are_operators_parts_of_them_or_families():
    assert rows_named(["mm"]) == rows_named(["aten::mm"]) == rows_named(["aten.mm.default"]) == ["aten.mm.default"]
    assert rows_named(["aten.add"]) == ["aten.add.Scalar", "aten.add.Tensor"]
    assert "aten.native_layer_norm.default" in rows_named(["norm"])
    with pytest.raises(UsageError, match=r"^there is no lemma 'nothing'; `graphguard lemmas ls` lists them$"):
        rows_named(["mm", "nothing"])


def test_rows_without_a_sample_are_listed_as_such(replaced):
    replaced("aten.digamma.default", lambda c, x: c.fn("digamma", x))
    notes = {
        line.operator: line.note for line in audit_rows(["aten.digamma.default", "aten.rand.default", "aten.sinc.default"])
    }
    assert notes == {
        "aten.digamma.default": "no sample",
        "aten.rand.default": "random: nothing is claimed",
        "aten.sinc.default": "",
    }


# ---------------------------------------------------------------------- the command
def run(*args):
    with pytest.raises(SystemExit) as stop:
        main(["lemmas", "audit", *args])
    return stop.value.code


OWN = """
import torch, graphguard as gg

@torch.library.custom_op("gg_audit::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

@twice.register_fake
def _(x):
    return torch.empty_like(x)

gg.lemma("gg_audit::twice", "b h -> b h", whole="h")
"""


def test_the_command_prints_a_table(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(scope, "_OF_PROCESS", {})
    file = tmp_path / "own.py"
    file.write_text(OWN)
    assert run(str(file), "sinc", "gg_audit::twice", "--examples", "2", "--seed", "3") == 0
    head, built_in, mine, weaker, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["operator", "cases", "wrong", "could", "be", "weaker", "seconds"]
    operator, cases, wrong, could, _ = built_in.split()
    assert (operator, wrong, could) == ("aten.sinc.default", "0", "0") and int(cases) > 4
    assert mine.split()[:1] + mine.split()[2:4] + mine.split()[5:] == ["gg_audit::twice", "0", "1", "yours"]
    assert weaker == "could be weaker: gg_audit::twice: h need not be whole"
    assert last.startswith("2 lemmas, ") and last.endswith(" cases: 0 wrong, 1 could be weaker, 0 without a sample")


def test_the_command_exits_with_1_if_a_lemma_is_wrong(replaced, capsys):
    replaced("aten.sinc.default", lambda c, x: c.fn("sin", x))
    assert run("sinc") == 1
    out = capsys.readouterr().out
    assert "wrong: aten.sinc.default: sinc_of_each, whole: " in out and "1 wrong" in out


def test_the_command_knows_no_other_names(capsys):
    assert run("nothing") == 2
    assert capsys.readouterr().err == "error: there is no lemma 'nothing'; `graphguard lemmas ls` lists them\n"
    assert run("nowhere.py") == 2
    assert capsys.readouterr().err == "error: there is no file nowhere.py\n"


def test_a_file_whose_lemma_is_refused_is_an_error(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(scope, "_OF_PROCESS", {})
    file = tmp_path / "refused.py"
    file.write_text(OWN.replace("twice", "thrice").replace('"b h -> b h", whole="h"', "lambda x: 3 * x"))
    assert run(str(file)) == 2
    assert "error: the lemma of gg_audit::thrice is refused: on operands of shape" in capsys.readouterr().err
