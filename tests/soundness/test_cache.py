"""A result that was kept is taken for the same question only, and only if GraphGuard has written it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import command, python

import graphguard
import graphguard as gg
from graphguard import Partial, Replicate, Shard, pipeline, scope
from graphguard.cache import content, folder, kit
from graphguard.cache.codec import DamagedError, read, written
from graphguard.capture.front import Problem
from graphguard.graph.ir import Graph, Mesh
from graphguard.report.report import Report

SECRET = b"s" * 32


def mlp(x, a, b):
    return torch.relu(x @ a) @ b


def tp_mlp(x, a, b):
    y = torch.relu(x @ a) @ b
    dist.all_reduce(y)
    return y


def forgotten(x, a, b):
    return torch.relu(x @ a) @ b


def doubled(x, a, b):
    y = torch.relu(x @ a) @ b * FACTOR
    dist.all_reduce(y)
    return y


def halved(x, a, b):
    return torch.relu(x @ a) @ b * 2


def above(limit):
    """Rows whose sum is above a limit: which ones is read."""

    def program(x, w):
        rows = (x.sum(-1) > limit).nonzero().flatten()
        return torch.zeros_like(x).index_add(0, rows, x[rows] @ w)

    return program


FACTOR = 2
INPUTS = {"x": gg.Input((4, 8)), "a": gg.Input((8, 8), Shard(1)), "b": gg.Input((8, 8), Shard(0))}
ASKED = {"sequential": mlp, "distributed": tp_mlp, "mesh": {"tp": 2}, "inputs": INPUTS, "trials": 1}


@pytest.fixture(autouse=True)
def begun_long_ago(monkeypatch):
    """The tests run on files that were perhaps written a moment ago, and beside tests that say lemmas of their own, with which
    nothing is kept."""
    monkeypatch.setattr(graphguard, "LOADED", time.time() + 3600)
    monkeypatch.setattr(kit.graphguard, "LOADED", time.time() + 3600)
    monkeypatch.setattr(scope, "_OF_PROCESS", {})


@pytest.fixture
def kept(tmp_path):
    return folder.Folder(str(tmp_path / "kept"), SECRET)


def ask(kept, **changed):
    """The report, and whether it was kept."""
    with pipeline.keeping(kept):
        report = gg.verify(**{**ASKED, **changed})
    return report, "kept" in report.stats


def only_file(kept):
    (file,) = Path(kept.path).rglob("*.json")
    return file


# ---------------------------------------------------------------------- the same
def test_what_was_proved_is_not_proved_again(kept, monkeypatch):
    first, was_kept = ask(kept)
    assert not was_kept and first.verdict == "verified"
    monkeypatch.setattr(pipeline, "decide", None)
    again, was_kept = ask(kept)
    assert was_kept and again.stats["seconds"]["proof"] is None and again.stats["seconds"]["capture"] > 0
    assert replace(again, stats=first.stats) == first and "all else kept from an earlier run" in str(again)
    assert {**json.loads(again.to_json()), "stats": None} == {**json.loads(first.to_json()), "stats": None}


@pytest.mark.parametrize("outputs", [{"out": Replicate()}, None])
def test_all_verdicts_come_back_as_they_were(kept, tmp_path, outputs):
    for distributed in (forgotten, doubled):
        first, _ = ask(kept, distributed=distributed, outputs=outputs)
        again, was_kept = ask(kept, distributed=distributed, outputs=outputs)
        assert was_kept and written(replace(again, stats={})) == written(replace(first, stats={}))
        if first.counterexample is not None:
            assert again.counterexample == first.counterexample
        seconds = first.stats["seconds"], again.stats["seconds"]
        shown = str(replace(first, stats={})), str(replace(again, stats={}))
        assert shown[0] == shown[1] and seconds[1]["oracle"] is None


def test_without_a_memory_nothing_is_kept(kept):
    for _ in range(2):
        assert "kept" not in gg.verify(**ASKED).stats


# ---------------------------------------------------------------------- another question
def bounded(**bounds):
    return {**INPUTS, "x": gg.Input((4, 8), **bounds)}


CHANGES = {
    "rank program": {"distributed": doubled},
    "sequential program": {"sequential": halved},
    "both": {"sequential": halved, "distributed": doubled},
    "mesh size": {"mesh": {"tp": 4}},
    "mesh axes": {"mesh": {"dp": 1, "tp": 2}, "inputs": {**INPUTS, "a": gg.Input((8, 8), {"tp": Shard(1)}),
                                                         "b": gg.Input((8, 8), {"tp": Shard(0)})}},
    "name of the axis": {"mesh": {"model": 2}},
    "shape": {"inputs": {**INPUTS, "x": gg.Input((2, 8))}},
    "dtype": {"inputs": {name: gg.Input(each.shape, each.placement, torch.float64) for name, each in INPUTS.items()}},
    "placement": {"inputs": {**INPUTS, "x": gg.Input((4, 8), Partial())}},
    "other placements": {"inputs": {**INPUTS, "a": gg.Input((8, 8)), "b": gg.Input((8, 8))}},
    "low": {"inputs": bounded(low=0)},
    "high": {"inputs": bounded(high=1)},
    "low and high": {"inputs": bounded(low=0, high=1)},
    "expectation": {"outputs": {"out": Replicate()}},
    "wrong expectation": {"outputs": {"out": Shard(0)}},
    "expected by a function": {"outputs": {"out": lambda full, coord: full}},
    "trials": {"trials": 2},
    "no trials": {"trials": 0},
    "trials left out": {"trials": None},
    "seed": {"seed": 1},
    "limits": {"limits": {"factors": 3}},
}  # fmt: skip


def key_of(**changed):
    with pipeline.collecting() as jobs:
        gg.verify(**{**ASKED, **changed})
    (job,) = jobs
    return content.key_of(job.front.problem(frozenset()), {}, job.trials, job.seed, pipeline.limits_of(job.limits))


def test_another_question_has_another_key():
    keys = {change: key_of(**CHANGES[change]) for change in CHANGES}
    assert len({key_of(), *keys.values()}) == 1 + len(CHANGES) and key_of() == key_of()


@pytest.mark.parametrize("change", ["rank program", "wrong expectation", "placement"])
def test_another_question_is_not_answered_by_what_was_kept(kept, change):
    first, _ = ask(kept)
    other, was_kept = ask(kept, **CHANGES[change])
    assert not was_kept and (first.verdict, other.verdict) == ("verified", "refuted")
    assert ask(kept)[1]


def test_what_a_program_reads_from_elsewhere_counts(kept, monkeypatch):
    """The files are the same; a global is another."""
    assert ask(kept, distributed=doubled)[0].verdict == "refuted"
    monkeypatch.setitem(globals(), "FACTOR", 1)
    assert [ask(kept, distributed=doubled)[0].verdict, ask(kept, distributed=doubled)[1]] == ["verified", True]
    monkeypatch.setitem(globals(), "FACTOR", 2)
    assert ask(kept, distributed=doubled)[0].verdict == "refuted"


WORDS = ["graphguard", "torch", "numpy", "python"]


@pytest.mark.parametrize("word", WORDS)
def test_another_kit_proves_again(kept, monkeypatch, word):
    ask(kept)
    other = {**kit.kit(), word: "another"}
    monkeypatch.setattr(content, "kit", lambda: other)
    assert not ask(kept)[1]


def test_the_kit_is_the_content_of_every_file():
    assert set(kit.kit()) == set(WORDS) and kit.kit()["torch"] == torch.__version__
    table = Path(pipeline.__file__).parent / "lemmas" / "audited.txt"
    assert len(kit.kit()["graphguard"]) == 64 and {Path(kit.__file__), Path(pipeline.__file__), table} <= set(kit._files())


def test_a_change_of_graphguard_changes_its_content(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("1")
    monkeypatch.setattr(kit, "_PACKAGE", tmp_path)
    found = {kit._content()}
    for name, text in [("a.py", "2"), ("a.py", ""), ("b.py", ""), ("b.py", "1"), ("table.txt", "")]:
        (tmp_path / name).write_text(text)
        found.add(kit._content())
    assert len(found) == 6


def test_what_was_changed_after_it_was_loaded_is_not_kept(kept, monkeypatch):
    ask(kept)
    monkeypatch.setattr(graphguard, "LOADED", Path(pipeline.__file__).stat().st_ctime)
    assert not ask(kept)[1]
    assert python("import graphguard, time; print(0 <= time.time() - graphguard.LOADED < 60)") == "True\n"


def test_the_state_of_torch_and_the_folder_count(kept, tmp_path, monkeypatch):
    ask(kept)
    with monkeypatch.context() as patched:
        patched.setattr(content, "_state_of_torch", lambda: ["2.13.0", "?", "torch.float64"])
        assert not ask(kept)[1]
    assert ask(kept)[1]
    monkeypatch.chdir(tmp_path)
    assert not ask(kept)[1]


# ---------------------------------------------------------------------- what has no content
@torch.library.custom_op("gg_cache::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * 2)


double.register_fake(torch.empty_like)


@pytest.mark.parametrize("with_lemma", [False, True])
def test_operators_and_lemmas_of_the_users_own_are_not_kept(kept, with_lemma):
    from graphguard.scope import opened

    asked = {"sequential": lambda x: double(x), "distributed": lambda x: double(x), "inputs": {"x": gg.Input((4,), Shard(0))}}
    with opened():
        lemmas = [gg.lemma("gg_cache::double", lambda x: x * 2)] if with_lemma else []
        for _ in range(2):
            assert not ask(kept, **asked, lemmas=lemmas)[1]
    assert not list(Path(kept.path).rglob("*"))


def test_a_lemma_that_is_only_known_is_reason_enough(kept):
    from graphguard.scope import opened

    with opened():
        gg.lemma("gg_cache::double", lambda x: x * 2)
        assert not ask(kept)[1] and not ask(kept)[1]


def test_ranks_that_do_not_fit_together_are_not_kept(kept):
    def alone(x, a, b):
        if dist.get_rank() == 0:
            dist.all_reduce(x)
        return mlp(x, a, b)

    for _ in range(2):
        report, was_kept = ask(kept, distributed=alone)
        assert report.verdict == "refuted" and not was_kept


def test_a_part_that_nobody_thought_of_is_not_kept(kept, monkeypatch):
    problem = _problem()
    assert content.key_of(problem, {}, None, 0, pipeline.limits_of())
    for name, known in [("_OF_GRAPHS", content._OF_GRAPHS - {"built"}), ("_OF_JOINTS", set()), ("_OF_NODES", set())]:
        with monkeypatch.context() as patch:
            patch.setattr(content, name, known)
            with pytest.raises(content.UnkeptError):
                content.key_of(problem, {}, None, 0, pipeline.limits_of())
    with pytest.raises(content.UnkeptError):
        content.plain(object())
    with pytest.raises(content.UnkeptError):
        content.plain(lambda: 0)


def _problem():
    with pipeline.collecting() as jobs:
        gg.verify(**ASKED)
    return jobs[0].front.problem(frozenset())


def test_every_part_of_a_problem_changes_its_key():
    """Whatever fields there are: each one, exchanged for another, gives another key."""
    problem = _problem()
    captured = problem.captured
    other = gg.capture_function(mlp, doubled, mesh={"tp": 2}, inputs=INPUTS)
    keys = {_key(problem)}
    changes = {
        "mesh": replace(problem.mesh, axes=(("tp", 3),)), "expected": {"out": None}, "bounds": {"x": (0.0, None)},
        "parameters": {"w": "Shard"}, "guesses": ("a guess",), "captured": None,
    }  # fmt: skip
    assert set(changes) | {"along"} == {each.name for each in fields(Problem)}  # along paths nothing is kept
    keys |= {_key(replace(problem, **{name: value})) for name, value in changes.items() if name != "captured"}
    parts = {
        "sequential": other.ranks[0], "ranks": other.ranks, "relations": other.ranks, "joint": other.joint,
        "assumptions": ["one"], "unstable": "it is", "classes": 3, "by_rank": "it is many",
        "matched": captured.world(),
    }  # fmt: skip
    assert {*parts, "seconds"} == {each.name for each in fields(captured)}
    keys |= {_key(replace(problem, captured=replace(captured, **{name: value}))) for name, value in parts.items()}
    assert len(keys) == 1 + 5 + 9
    assert _key(replace(problem, captured=replace(captured, seconds=9.0))) == _key(problem)


def _class_problem(distributed, inputs, mesh=40):
    captured = gg.capture_function(mlp, distributed, mesh=mesh, inputs=inputs)
    assert captured.matched is not None and not captured.ranks._made
    return Problem(Mesh.of({"world": mesh}), captured)


def test_classes_of_ranks_have_a_key():
    inputs = {"x": gg.Input((4, 8)), "a": gg.Input((8, 80), Shard(1)), "b": gg.Input((80, 8), Shard(0))}

    def of_its_own(x, a, b):
        return tp_mlp(x, a, b).narrow(0, dist.get_rank() % 2, 2)

    def of_another(x, a, b):
        return tp_mlp(x, a, b).narrow(0, dist.get_rank() // 20, 2)

    problems = [_class_problem(each, inputs) for each in (tp_mlp, forgotten, of_its_own, of_another)]
    assert len({_key(problem) for problem in problems}) == 4
    assert _key(_class_problem(of_its_own, inputs)) == _key(problems[2])
    assert not problems[2].captured.ranks._made  # nor is any graph written out for it


def _key(problem):
    return content.key_of(problem, {}, None, 0, pipeline.limits_of())


def test_every_part_of_a_graph_changes_its_hash():
    graph = _problem().captured.ranks[0]
    value = next(iter(graph.inputs.values()))
    changes = {
        "name": "other", "inputs": {}, "outputs": {}, "nodes": graph.nodes[:-1], "layouts": {"out": ()},
        "input_layouts": {"a": ()}, "ties": {"a": "b"},
        "states": {value: "seed"}, "mesh": None, "rank": 7, "assumptions": ("one",), "built": 1,
        "constants": {value: replace_constant()},
    }  # fmt: skip
    assert {*changes, "findings"} == {each.name for each in fields(Graph)}
    hashes = {content._graph(graph), *(content._graph(replace(graph, **{name: each})) for name, each in changes.items())}
    assert len(hashes) == 1 + len(changes)


def replace_constant():
    from graphguard.graph.ir import Constant

    return Constant("float32", (1,), b"0000")


# ---------------------------------------------------------------------- damaged and hostile files
def forged(entry, secret=SECRET):
    entry = {name: value for name, value in entry.items() if name != "seal"}
    return {**entry, "seal": folder.Folder("", secret)._seal(entry)}


def relabelled(entry):
    entry["report"]["Report"]["verdict"] = "verified"
    entry["report"]["Report"]["findings"] = {"list": []}
    return entry


DAMAGES = {
    "empty": lambda text: "",
    "cut off": lambda text: text[: len(text) // 2],
    "no JSON": lambda text: "\x80\x04\x95 pickled",
    "deep": lambda text: "[" * 100_000,
    "a list": lambda text: "[]",
    "a number": lambda text: "3",
    "another verdict": lambda text: json.dumps(relabelled(json.loads(text))),
    "another verdict, sealed by another": lambda text: json.dumps(forged(relabelled(json.loads(text)), b"x" * 32)),
    "no seal": lambda text: json.dumps({**json.loads(text), "seal": ""}),
    "a seal that is no text": lambda text: json.dumps({**json.loads(text), "seal": None}),
    "a seal in letters of another kind": lambda text: json.dumps({**json.loads(text), "seal": "ä"}),
    "more than there should be": lambda text: json.dumps(forged({**json.loads(text), "more": 1})),
    "another key": lambda text: json.dumps(forged({**json.loads(text), "key": "0" * 64})),
    "another format": lambda text: json.dumps(forged({**json.loads(text), "format": "graphguard-graph"})),
    "another version": lambda text: json.dumps(forged({**json.loads(text), "version": 2})),
    "no report": lambda text: json.dumps(forged({**json.loads(text), "report": {"list": []}})),
    "verified without relations": lambda text: json.dumps(forged(relabelled(json.loads(text)))),
}


@pytest.fixture(scope="module")
def asked():
    """A question, and its answer: refuted."""
    with pipeline.collecting() as jobs:
        gg.verify(**{**ASKED, "distributed": doubled})
    problem = jobs[0].front.problem(frozenset())
    return "k" * 64, problem, pipeline.decide(problem, trials=1)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored_with_a_warning(kept, capsys, asked, damage):
    key, problem, report = asked
    kept.keep(key, problem, report)
    assert kept.recall(key, problem).verdict == "refuted"
    file = only_file(kept)
    file.write_text(DAMAGES[damage](file.read_text()), errors="surrogateescape")
    assert kept.recall(key, problem) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {file} is not taken for a result: ")
    kept.keep(key, problem, report)  # anew
    assert kept.recall(key, problem).verdict == "refuted"


def test_what_a_machine_was_too_weak_for_is_not_kept(kept, asked):
    key, problem, report = asked
    failed = {"trials": 0, "seed": 0, "skipped": "it cannot be executed: not enough memory"}
    kept.keep(key, problem, replace(report, stats={**report.stats, "oracle": failed}))
    kept.keep(key, problem, replace(report, opaque=["aten.mine.default"]))
    kept.keep(key, problem, replace(report, findings=[]))
    assert kept.recall(key, problem) is None


def test_what_is_ignored_is_proved_again(kept, capsys):
    ask(kept, distributed=doubled)
    file = only_file(kept)
    file.write_text(json.dumps(relabelled(json.loads(file.read_text()))))
    report, was_kept = ask(kept, distributed=doubled)
    assert report.verdict == "refuted" and not was_kept and "or it was changed" in capsys.readouterr().err
    assert ask(kept, distributed=doubled)[1]


def test_the_result_of_another_question_is_not_taken(kept, capsys):
    ask(kept)
    good = only_file(kept)
    text = good.read_text()
    good.unlink()
    ask(kept, distributed=doubled)
    only_file(kept).write_text(text)
    report, was_kept = ask(kept, distributed=doubled)
    assert report.verdict == "refuted" and not was_kept
    assert "is not taken for a result: it is the result of something else" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["link", "pipe", "folder", "large"])
def test_what_is_no_file_is_ignored(kept, capsys, asked, what, tmp_path, monkeypatch):
    key, problem, report = asked
    kept.keep(key, problem, report)
    file = only_file(kept)
    moved = file.rename(tmp_path / "elsewhere")
    match what:
        case "link":
            file.symlink_to(moved)
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "large":
            file.write_bytes(moved.read_bytes())
            monkeypatch.setattr(folder, "_LARGEST", 10)
    assert kept.recall(key, problem) is None
    assert "is not taken for a result: " in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    report, _ = ask(folder.Folder(str(tmp_path / "taken"), SECRET))
    assert report.verdict == "verified"
    assert "cannot be kept in" in capsys.readouterr().err


def test_another_user_has_another_secret(kept, asked):
    key, problem, report = asked
    kept.keep(key, problem, report)
    assert kept.recall(key, problem) and not replace(kept, secret=b"t" * 32).recall(key, problem)


@pytest.mark.parametrize(
    "plain",
    [[], {}, {"a": 1, "b": 2}, {"eval": "1"}, {"list": 3}, {"Report": {}}, {"Report": []}, {"Shard": {"dim": {}}}, 1.5,
     {"float": "x"}, {"Finding": {"kind": "nothing"}}, {"Source": []}, {"dict": [[{"list": []}, 1]]}, {"tuple": {"a": []}}],
)  # fmt: skip
def test_only_reports_are_read(plain):
    with pytest.raises(DamagedError):
        read(plain)


def test_numbers_that_json_does_not_have_are_kept():
    item = (float("inf"), -0.0, complex(1, -2), 1e300, True, 1, None, "\ud800", {1: (2,)})
    assert written(read(written(item))) == written(item) and read(written(item))[1:] == item[1:]
    assert str(read(written(float("nan")))) == "nan" and str(read(written(-0.0))) == "-0.0"
    with pytest.raises(content.UnkeptError):
        written(Report("verified", notes=[object()]))


# ---------------------------------------------------------------------- the user's folder
def test_the_folder_of_the_user(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("GRAPHGUARD_CACHE", "off")
    assert folder.of_user() is None
    monkeypatch.delenv("GRAPHGUARD_CACHE")
    made = folder.of_user()
    secret = tmp_path / "graphguard" / "secret"
    assert made.path == str(tmp_path / "graphguard" / "results") and made.secret == secret.read_bytes()
    assert secret.stat().st_mode & 0o777 == 0o600 and folder.of_user() == made
    monkeypatch.setenv("GRAPHGUARD_CACHE", "here")
    assert folder.of_user() == replace(made, path=os.path.abspath("here"))
    assert capsys.readouterr().err == ""
    secret.chmod(0o644)
    assert folder.of_user() is None
    secret.chmod(0o600)
    secret.write_bytes(b"")
    assert folder.of_user() is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert folder.of_user() is None
    first, second, third = capsys.readouterr().err.splitlines()
    assert "can be read by others" in first and "is damaged; remove it" in second and "cannot be used" in third


# ---------------------------------------------------------------------- runs
SUITE = """
import os, sys, time
import graphguard as gg
from graphguard import Shard

def seq(x):
    return x * 2

@gg.check(n=range(4))
def row(n):
    if n == 2 and os.path.exists("stuck"):
        open("stuck", "a").write("x")
        time.sleep(60)
    return gg.verify(seq, seq, mesh={"tp": 2}, inputs={"x": gg.Input((2 + n,), Shard(0))}, trials=1)
"""


@pytest.fixture
def suite(folder, monkeypatch):
    (folder / "a.py").write_text(SUITE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "home"))
    monkeypatch.delenv("GRAPHGUARD_CACHE")
    return folder


def kept_of(capfd, *args):
    code, out, _ = command(capfd, "verify", "a.py", "--output-format", "json", *args)
    checks = json.loads(out)["checks"]
    assert code == 0 and all(check["verdict"] == "verified" for check in checks)
    return ["kept" in check["stats"] for check in checks]


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_unchanged_check_is_not_proved_again_unless_it_is_asked_for(suite, capfd, jobs, monkeypatch):
    monkeypatch.setattr(kit, "_CLOCKS", -1e9)
    arguments = ["-j", jobs]
    if jobs == "2" and kit.changed_since_loaded():
        pytest.skip("files of GraphGuard are too new")
    assert kept_of(capfd, *arguments, "--no-cache") == [False] * 4 and not (suite / "home").exists()
    assert kept_of(capfd, *arguments) == [False] * 4
    assert kept_of(capfd, *arguments) == [True] * 4
    assert kept_of(capfd, *arguments, "--no-cache") == [False] * 4
    assert kept_of(capfd, *arguments, "--html", "site") == [False] * 4  # pages show more than is kept
    (suite / "a.py").write_text(SUITE.replace("x * 2", "x * 3"))
    sys.modules.pop("a", None)
    assert kept_of(capfd, *arguments) == [False] * 4
    assert [outcome.report.stats.get("kept") for outcome in gg.verify_many("a.py", cache=False)] == [None] * 4


def test_a_run_that_was_killed_goes_on_where_it_stopped(suite, capfd):
    if max(file.stat().st_ctime for file in kit._files()) > time.time() - 5:
        time.sleep(5)
    (suite / "stuck").write_text("")
    process = subprocess.Popen([sys.executable, "-m", "graphguard", "verify", "a.py", "-j", "1"], stdout=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not (suite / "stuck").read_text() and time.monotonic() < end:
        time.sleep(0.1)
    process.kill()
    process.wait()
    (suite / "stuck").unlink()
    assert kept_of(capfd) == [True, True, False, False]
    assert kept_of(capfd) == [True] * 4


# ---------------------------------------------------------------------- along paths
PATHS = {
    "sequential": above(0.0),
    "distributed": above(0.0),
    "mesh": {"dp": 2},
    "inputs": {"x": gg.Input((6, 4), Shard(0)), "w": gg.Input((4, 4))},
    "outputs": {"out": Shard(0)},
    "paths": 3,
}


def test_results_along_paths_are_kept(kept):
    first, was_kept = ask(kept, **PATHS)
    again, is_kept = ask(kept, **PATHS)
    assert (was_kept, is_kept) == (False, True)
    assert first.headline == again.headline == "verified along 3 paths"
    assert (first.decisions, first.relation, first.assumptions) == (again.decisions, again.relation, again.assumptions)


def test_other_paths_and_other_programs_are_asked_anew(kept):
    ask(kept, **PATHS)
    assert not ask(kept, **PATHS | {"seed": 5})[1]
    more, is_kept = ask(kept, **PATHS | {"paths": 4})
    assert (more.headline, is_kept) == ("verified along 4 paths", False)  # one of them was not tried before
    report, is_kept = ask(kept, **PATHS | {"distributed": above(1e-9)})
    assert (report.verdict, is_kept) == ("unproven", False)


def test_an_answer_along_a_path_is_no_answer_for_all_inputs(kept):
    with pipeline.collecting() as jobs:
        gg.verify(**{**ASKED, **PATHS})
    problem = next(iter(jobs[0].front.problems_along(1, 0, frozenset())))
    report = pipeline.decide(problem)
    assert folder._answers(report, problem)
    assert not folder._answers(report, replace(problem, along=None))
    assert content.plain(problem) != content.plain(replace(problem, along=None))
