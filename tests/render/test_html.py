"""The HTML report: what it has, that nothing of a program becomes markup, and that it works in a browser."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard
from graphguard.checks.check import Check, Outcome
from graphguard.engine.proof import Relation
from graphguard.engine.relate.law import law_at
from graphguard.graph.findings import Finding
from graphguard.graph.ir import Mesh, Node, Source
from graphguard.graph.listing import ListedProgram, Operation
from graphguard.graph.placement import parse
from graphguard.graph.tensor_layout import TensorLayout
from graphguard.oracle.difference import Counterexample, Element
from graphguard.render.html import Pages, fragment, page
from graphguard.render.svg import svg
from graphguard.report.report import OutputRelation, Report

EVIL = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>{{body}}&amp;"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def seq(x, w):
    return torch.relu(x @ w)


def par(x, w):
    y = torch.relu(x @ w)  # too early
    dist.all_reduce(y)
    return y


@pytest.fixture(scope="module")
def report():
    return gg.verify(seq, par, mesh={"tp": 2}, inputs={"x": gg.Input((8, 16), Shard(1)), "w": gg.Input((16, 4), Shard(0))})


class Tags(HTMLParser):
    """The tags of a page, with the text of each script."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.attributes = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "script" and self.scripts:
            self.scripts[-1] += data


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


# ---------------------------------------------------------------------- what a proof leaves for a page
def test_every_operation_has_its_relation(report):
    sequential, ranks = report.listing
    assert (sequential.ranks, ranks.ranks, ranks.name) == ((), (0, 1), "ranks 0, 1")
    assert [(each.operator, each.state, each.relation) for each in ranks.operations] == [
        ("input", "related", "sequential %0 as f32[8, 16@tp]"),
        ("input", "related", "sequential %1 as f32[16@tp, 4]"),
        ("aten.mm.default", "related", "sequential %2 as f32[8, 4] partial@tp"),
        ("aten.relu.default", "unrelated", "no copy, tile or summand of a sequential tensor"),
        ("dist.all_reduce", "unrelated", "no copy, tile or summand of a sequential tensor"),
    ]
    assert [(each.operator, each.state, each.relation) for each in sequential.operations][2:] == [
        ("aten.mm.default", "related", "f32[8, 4] partial@tp is %2 on ranks 0, 1"),
        ("aten.relu.default", "unrelated", "no tensor of the ranks is a copy, a tile or a summand of it"),
    ]


def test_a_function_that_is_not_linear_needs_the_sum_before_it(report):
    finding = report.findings[0]
    assert finding.law == "relu is not linear, so relu of summands is no summand of the result: sum over tp before it"
    assert [holding.type for holding in finding.holdings] == ["f32[8, 4] partial@tp"]


def biased(x, w, b):
    return x @ w + b


def biased_early(x, w, b):
    y = x @ w + b
    dist.all_reduce(y)
    return y


def test_a_whole_value_that_is_added_to_summands_counts_once_per_rank():
    inputs = {"x": gg.Input((8, 16), Shard(1)), "w": gg.Input((16, 4), Shard(0)), "b": gg.Input((4,))}
    finding = gg.verify(biased, biased_early, mesh={"tp": 2}, inputs=inputs).findings[0]
    assert finding.law == (
        f"the mm of line {biased_early.__code__.co_firstlineno + 1} is only a summand over tp on each rank and b is whole: "
        "after the sum, b counts once per rank"
    )
    assert [holding.type for holding in finding.holdings] == ["f32[8, 4] partial@tp", "f32[4]"]


def of(node_args, op, *holdings):
    return law_at(Node(op, node_args, {}, ()), holdings)


def test_laws_name_what_an_operation_needs_whole():
    mesh = Mesh.of({"tp": 2})
    tile = TensorLayout("x", "float32", (8, 4), mesh, (0, 1), parse(["Shard(1)"]))
    part = TensorLayout("y", "float32", (8, 4), mesh, (0, 1), parse(["Partial(sum)"]))
    whole = TensorLayout("b", "float32", (4,), mesh, (0, 1), parse(["Replicate"]))
    needs = "needs all 4 of dim 1, and each rank has only its part of them over tp"
    assert of((None, -1, False), "aten._softmax.default", tile) == f"_softmax {needs}"
    assert of((None, 2), "aten.linalg_vector_norm.default", tile) == f"linalg_vector_norm {needs}"
    assert of((None, (4,)), "aten.native_layer_norm.default", tile) == f"native_layer_norm {needs}"
    assert of((None, 0, False), "aten._softmax.default", tile) is None
    assert of((), "aten.addmm.default", whole, tile, None) == (
        "the product is only a summand over tp on each rank and b is whole: after the sum, b counts once per rank"
    )
    assert of((), "aten.mul.Tensor", part, part) == (
        "both operands of mul are summands over tp: the product of two sums is not the sum of the products"
    )
    assert of((), "aten.mul.Tensor", part, whole) is None and of((), "aten.relu.default", whole) is None
    assert of((), "dist.all_reduce", part) is None


def test_ranks_that_do_not_fit_together_are_listed_without_relations():
    def alone(x):
        if dist.get_rank() == 0:
            dist.all_reduce(x)
        return x

    report = gg.verify(lambda x: x, alone, mesh={"tp": 2}, inputs={"x": gg.Input((4,))})
    assert [program.name for program in report.listing] == ["sequential", "rank 0", "rank 1"]
    assert (
        report.listing[1].operations[-1].operator == "dist.all_reduce" and report.listing[1].operations[-1].state == "unknown"
    )


# ---------------------------------------------------------------------- the page
def test_a_page_needs_no_network_and_runs_no_script_but_its_own(report, tmp_path):
    report.to_html(tmp_path / "deep" / "page.html")
    text = (tmp_path / "deep" / "page.html").read_text()
    tags = Tags(text)
    assert not {"link", "img", "iframe"} & set(tags.tags) and tags.tags.count("script") == 2
    assert not [value for name, value in tags.attributes if name in ("src", "href")] and "http" not in text.replace(
        "http-equiv", ""
    )
    assert re.search(r"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-[^']+'", text)
    assert "prefers-color-scheme: dark" in text


def test_a_page_has_all_that_the_report_has(report):
    text = page(report, "model.py::biased", "verified")
    plain = html.unescape(text)
    assert "<title>refuted: model.py::biased</title>" in text and "(expected verified)" in text
    finding = report.findings[0]
    for said in (finding.message, finding.law, finding.holdings[0].type, *report.assumptions, "capture, seconds"):
        assert said in plain
    places = [
        {each.place for each in (one.sequential, *one.lines, *one.sources) if each is not None} for one in report.findings
    ]
    assert "<b>Look also at</b>" in text
    assert plain.count("<span class=marked>") == sum(map(len, places)) and "# too early" in plain and text.count("<svg") == 1
    assert report.counterexample.lines()[0].removeprefix("counterexample: ") in plain
    assert report.counterexample.script in plain and "<dt>inputs</dt><dd class=mono>" in text
    assert "<b>What to do.</b> " in text


def test_a_line_of_both_programs_is_shown_once():
    here = Source(__file__, 1, "f")
    text = page(Report("unproven", findings=[Finding("relation-lost", "lost", sequential=here, distributed=here)]))
    assert text.count("<span class=marked>") == 1 and "<b>both</b>" in text
    assert "<code>gg.lemma(operator, definition in torch)</code>" in text


def test_the_break_is_in_focus_in_both_programs(report):
    sequential, ranks = data_of(page(report))
    for program in (sequential, ranks):
        (focused,) = [row for row in program["operations"] if row[0] == program["focus"]]
        assert "aten.relu" in focused[1]


def hostile():
    source = Source(f"/tmp/{EVIL}.py", 3, EVIL)
    mesh = Mesh.of({EVIL: 2})
    holding = TensorLayout(EVIL, EVIL, (8,), mesh, (0, 1), parse(["Shard(0)"]), EVIL)
    finding = Finding("race", EVIL, (0,), (source,), source, source, "forward", EVIL, EVIL, (holding,))
    operation = Operation(0, EVIL, EVIL, source, False, "unrelated", EVIL)
    return Report(
        "refuted", OutputRelation({EVIL: Relation(EVIL, EVIL, ((EVIL, EVIL),), EVIL, EVIL)}), [finding],
        Counterexample(0, {EVIL: (2,)}, Element(EVIL, 0, (0,), 1.0, 2.0), None, EVIL), {EVIL: EVIL},
        [EVIL], [EVIL], {EVIL: EVIL}, [EVIL], {"ops": 1, "ranks": 2, "seconds": {EVIL: 0.5}},
        programs=[ListedProgram("sequential", (), (operation,)), ListedProgram(EVIL, (0, 1), (operation,))],
    )  # fmt: skip


def test_hostile_names_stay_text(tmp_path):
    report = hostile()
    clean = Tags(page(Report("refuted", findings=[Finding("race", "m", sources=(Source("f", 1),))])))
    for text in (page(report, EVIL, EVIL), fragment(report)):
        tags = Tags(text)
        assert "img" not in tags.tags and "<script>alert" not in text and "onerror" not in dict(tags.attributes)
        assert EVIL in html.unescape(text)
    assert data_of(page(report, EVIL))[0]["operations"][0][1] == EVIL
    assert Tags(page(report, EVIL)).tags.count("script") == clean.tags.count("script") + 1  # the operations, as data
    site = Pages(str(tmp_path))
    site.add(Outcome(Check(EVIL, EVIL, None, "verified"), hostile(), None))
    site.finish()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2 and all(re.fullmatch(r"[\w.-]+\.html", name) for name in names)
    index = (tmp_path / "index.html").read_text()
    assert Tags(index).tags.count("script") == 1 and "<img" not in index
    assert ">1 refuted</span>" in index


def test_a_notebook_shows_a_fragment_without_script(report):
    text = report._repr_html_()
    assert Tags(text).tags.count("script") == 0 and 'class="verdict refuted"' in text and "<svg" in text


def test_a_picture_names_its_tiles_and_ranks():
    mesh = Mesh.of({"dp": 2, "tp": 2})
    text = svg(TensorLayout("t", "float32", (8, 4), mesh, (0, 1, 2, 3), parse(["Shard(0)", "Shard(1)"])))
    for said in (
        ">0:4<",
        ">4:8<",
        ">0:2<",
        ">2:4<",
        "<title>rank 3</title>",
        'aria-label="t is f32[8@dp, 4@tp] on dp=2 x tp=2"',
    ):
        assert said in text
    assert text.count('class="hatch"') == 0
    summands = TensorLayout("t", "float32", (8,), mesh, (0, 1, 2, 3), parse(["Shard(0)", "Partial(sum)"]))
    assert svg(summands).count('class="hatch"') == 2
    many = svg(TensorLayout("t", "float32", (64,), Mesh.of({"tp": 64}), tuple(range(64)), parse(["Shard(0)"])))
    assert many.count("<title>") == 8 and "and 56 more columns" in many


# ---------------------------------------------------------------------- in a browser
def browse(path, fragment=""):
    """The page after its script ran."""
    arguments = [CHROMIUM, "--headless", "--disable-gpu", "--no-first-run", f"--user-data-dir={path.parent / 'profile'}"]
    arguments += ["--no-sandbox"] if os.geteuid() == 0 else []
    done = subprocess.run([*arguments, "--dump-dom", f"{path.as_uri()}{fragment}"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


DRIVER = """
<script>
addEventListener("load", () => {
  const box = document.getElementById("search"), out = document.createElement("output"), seen = [];
  const rows = (pane) => [...document.querySelectorAll(`#${pane} .operation`)];
  const look = (what) => seen.push([what, rows("sequential").length, rows("distributed").length]);
  const focus = (pane) => document.querySelector(`#${pane} .focus`);
  const visible = (row) => {
    const inner = row.getBoundingClientRect(), outer = row.parentElement.getBoundingClientRect();
    return inner.top >= outer.top && inner.bottom <= outer.bottom;
  };
  look("all");
  seen.push(["focused", focus("sequential").textContent, focus("distributed").textContent]);
  seen.push(["visible", visible(focus("sequential")), visible(focus("distributed"))]);
  box.value = "AATEN.mm.default"; box.dispatchEvent(new Event("input")); look("nothing");
  box.value = "partial@tp MM"; box.dispatchEvent(new Event("input")); look("mm");
  document.getElementById("to-break").click(); look("again");
  const lost = document.getElementById("lost"); lost.click(); look("lost");
  rows("distributed")[0].click(); lost.click();
  rows("distributed").find((row) => row.textContent.includes("partial@tp")).click();
  seen.push(["partner", document.querySelector("#sequential .partner").textContent.includes("aten.mm")]);
  out.id = "seen"; out.textContent = JSON.stringify(seen); document.body.append(out);
});
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_browser_searches_and_focuses_the_break(report, tmp_path):
    path = tmp_path / "page.html"
    text = page(report, "model.py::biased")
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>', text)[0]
    path.write_text(text.replace(policy, "").replace("</body>", f"{DRIVER}</body>"))
    seen = json.loads(html.unescape(re.search(r'<output id="seen">(.*?)</output>', browse(path))[1]))
    told = {each[0]: each[1:] for each in seen}
    assert told["all"] == [4, 5] and "aten.relu" in told["focused"][0] and "aten.relu" in told["focused"][1]
    assert told["visible"] == [True, True]
    assert told["nothing"] == [1, 1] and told["mm"] == [1, 1]  # the line that says so; the product
    assert told["again"] == [4, 5] and told["lost"] == [1, 2] and told["partner"] == [True]


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_browser_opens_a_large_page_at_the_break_and_a_link_to_a_search(tmp_path):
    source = Source("model.py", 9)
    operations = [Operation(n, f"aten.op{n}", f"%{n}: f32[2] = aten.op{n}()", None, False, "related", "") for n in range(5000)]
    operations[4000] = Operation(4000, "aten.bad", "%4000: f32[2] = aten.bad()", source, False, "unrelated", "lost")
    programs = [ListedProgram("sequential", (), tuple(operations)), ListedProgram("ranks 0, 1", (0, 1), tuple(operations))]
    finding = Finding("relation-lost", "it stops", sequential=source, distributed=source)
    path = tmp_path / "page.html"
    path.write_text(page(Report("unproven", findings=[finding], programs=programs)))
    dom = browse(path)
    assert dom.count('class="operation unrelated focus"') == 2 and 'id="break-sequential"' in dom and "3980 before" in dom
    assert dom.count('class="operation related"') < 700
    dom = browse(path, "#search=op4999")
    assert "1 of 5000 operations" in dom and dom.count('class="operation related"') == 2


def layered(wrong):
    """Operations of layers, one of which is wrong, with something of the model itself between them."""
    operations, number = [], 0
    for layer in range(32):
        for module, line in (
            (f"model.layers.{layer}.up", 3),
            (f"model.layers.{layer}.up", 3),
            (f"model.layers.{layer}", 4),
            ("", 9),
        ):
            source = Source("model.py", line).inside(module)
            state = "unrelated" if layer == wrong and line == 4 else "related"
            text = f"%{number}: f32[2] = aten.op{line}(%{max(0, number - 1)})"
            operations.append(Operation(number, f"aten.op{line}", text, source, False, state, ""))
            number += 1
    return ListedProgram("sequential", (), tuple(operations))


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_browser_folds_equal_layers_and_opens_the_one_that_is_wrong(tmp_path):
    programs = [layered(17), replace(layered(17), name="ranks 0, 1", ranks=(0, 1))]
    source = next(each.source for each in programs[0].operations if each.state == "unrelated")
    finding = Finding("relation-lost", "it stops", sequential=source, distributed=source)
    path = tmp_path / "page.html"
    path.write_text(page(Report("unproven", findings=[finding], programs=programs)))
    dom = browse(path)
    assert dom.count("model.layers.0 … model.layers.16") == 2 and dom.count("×17") == 2
    assert dom.count("model.layers.18 … model.layers.31") == 2 and dom.count("×14") == 2
    assert dom.count('class="operation unrelated focus"') == 2 and dom.count(">model.layers.17<") == 2
    dom = browse(path, "#search=layers.3.up")
    assert "2 of 128 operations" in dom and "model.layers.3.up (model.py:3)" in dom


def test_a_page_folds_outputs_and_parameters_and_says_what_it_is_of():
    paths = [f"grads.h.{n}.weight" for n in range(20)]
    relations = OutputRelation({path: Relation(path, f"{path} = ...", (("tp", "Shard(0)"),)) for path in paths})
    seconds = {"capture": 1.0, "proof": 2.0, "oracle": None}
    stats = {"ops": 7, "ranks": 4, "classes": 1, "mesh": "tp=4", "seconds": seconds, "versions": {"torch": "2.13.0"}}
    names = {path.removeprefix("grads."): "Shard(0) on tp, as params= states" for path in paths}
    text = page(Report("verified", relations, parameters=names, stats=stats))
    assert "<summary>grads.h.*.weight: Shard(0) on tp   (20 outputs)</summary>" in text and 'id="find"' in text
    assert "<li>h.*.weight: Shard(0) on tp, as params= states</li>" in text
    assert "tp=4 · 4 ranks in 1 class · 7 operations · capture 1.00 s · proof 2.00 s · torch 2.13.0" in text


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_browser_runs_nothing_of_a_hostile_report(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page(hostile(), EVIL).replace("alert(", "document.title=String("))
    dom = browse(path)
    assert "<title>refuted: " in dom and dom.count("<script") == 2 and 'class="operation unrelated focus"' in dom
