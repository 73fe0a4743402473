"""`graphguard verify`: which checks it finds, what it prints, and its exit codes. The prover is a fake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from types import ModuleType, SimpleNamespace

import pytest

from graphguard.checks import find_all_checks
from graphguard.cli import main
from graphguard.engine.proof import Proof, Relation
from graphguard.errors import ProgramError, UsageError
from graphguard.findings import Finding
from graphguard.ir import Source

HEAD = """
    import torch, torch.distributed as dist
    import graphguard as gg

    def seq(x):
        return x * 2

    def good(x):
        return x * 2

    def lost(x):
        return x * 3

    def races(x):
        work = dist.all_reduce(x, async_op=True)
        y = x + 1  # used
        work.wait()
        return y

    def verify(program):
        return gg.verify(seq, program, mesh={"tp": 2}, inputs={"x": gg.Input((4,))})
"""
PASSES = """
    @gg.check
    def passes():
        print("a line of the check")
        return verify(good)
"""
UNPROVEN = """
    @gg.check
    def unproven():
        return verify(lost)
"""
REFUTED = """
    @gg.check
    def refuted():
        return verify(races)
"""
CAUGHT = """
    @gg.check(expect="refuted")
    def caught():
        return verify(races)
"""
MISSED = """
    @gg.check(expect="refuted")
    def missed():
        return verify(good)
"""
SUSPECTED = """
    @gg.check(expect="refuted")
    def suspected():
        return verify(lost)
"""
OPEN = """
    @gg.check(expect="unproven")
    def open_question():
        return verify(lost)
"""
BROKEN = """
    @gg.check
    def broken():
        raise ValueError("no luck")  # raises
"""
EMPTY = """
    @gg.check
    def empty():
        verify(good)
"""
STRICT = """
    @gg.check
    def strict():
        verify(lost).raise_if_not_verified()
"""


def prove(sequential, joint, relations, *, expected, ranges):
    """Verified if the ranks multiply by what the sequential program multiplies by."""
    assumptions = ["numbers are real"]
    (mine,), (its,) = sequential.nodes, joint.graphs[0].nodes
    if mine.args[1] == its.args[1]:
        relation = Relation("out", "out = rank0.out   (equal on all 2 ranks)", (("tp", "Replicate"),), "f32[4]")
        return Proof({"out": relation}, assumptions=assumptions)
    finding = Finding("relation-lost", "no clean expression covers mul", (), (), mine.source, its.source, "forward")
    return Proof({}, [finding], assumptions, ["mylib.norm.default"])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    module = ModuleType("graphguard.engine.prove")
    module.prove = prove
    monkeypatch.setitem(sys.modules, "graphguard.engine.prove", module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name, loaded in list(sys.modules.items()):
        if str(getattr(loaded, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def write(folder, name, *parts):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(textwrap.dedent(part) for part in (HEAD, *parts)))
    return name


def line(name, mark):
    with open(name) as lines:
        return next(number for number, text in enumerate(lines, 1) if text.rstrip().endswith(mark))


def run(capsys, *args):
    """Exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as caught:
        main(["verify", *args])
    out, err = capsys.readouterr()
    return caught.value.code or 0, out, err


# ---------------------------------------------------------------------- exit codes
CODES = [
    ([PASSES], 0), ([CAUGHT], 0), ([OPEN], 0), ([PASSES, CAUGHT, OPEN], 0), ([UNPROVEN], 3), ([PASSES, UNPROVEN], 3),
    ([REFUTED], 1), ([UNPROVEN, REFUTED], 1), ([MISSED], 1), ([SUSPECTED], 3), ([SUSPECTED, CAUGHT], 3), ([BROKEN], 2),
    ([BROKEN, REFUTED], 2), ([PASSES, BROKEN], 2), ([EMPTY], 2), ([STRICT], 3),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "code"), CODES)
def test_the_exit_code_says_whether_every_verdict_is_the_expected_one(folder, capsys, parts, code):
    assert run(capsys, write(folder, "checks.py", *parts))[0] == code


def test_every_check_runs_though_one_cannot(folder, capsys):
    file = write(folder, "checks.py", BROKEN, PASSES)
    code, out, err = run(capsys, file)
    raised = line(file, "# raises")
    assert (
        code == 2
        and out.startswith("verified: checks.py::passes\n")
        and out.endswith("1 verified, 1 that could not run; 1 not as expected\n")
    )
    first, frame = [text for text in err.splitlines() if text != "a line of the check"]
    assert first == f"error: checks.py::broken: checks.py:{raised}: the check broken raised ValueError: no luck"
    assert frame.endswith(f'checks.py", line {raised}, in broken')


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (EMPTY, "error: checks.py::empty: the check empty returned NoneType; it must return gg.verify(...)"),
        (
            "@gg.check\ndef wrong():\n    return gg.verify(seq, good, mesh=2, inputs={'y': gg.Input((4,))})",
            "error: checks.py::wrong: the sequential program seq takes no input 'y'; it takes ['x']",
        ),
    ],
)
def test_a_check_that_cannot_run_is_one_line(folder, capsys, source, text):
    code, out, err = run(capsys, write(folder, "checks.py", source), "--output-format", "concise")
    assert (code, out, err) == (2, "1 that could not run; 1 not as expected\n", f"{text}\n")


def test_a_defect_of_ours_is_an_error_not_a_verdict(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["graphguard.engine.prove"], "prove", lambda *args, **options: 1 // 0)
    code, _, err = run(capsys, write(folder, "checks.py", CAUGHT, UNPROVEN))
    assert code == 2 and err == (
        "error: checks.py::unproven: ZeroDivisionError in GraphGuard itself: integer division or modulo by zero; "
        "please report it\n"
    )


# ---------------------------------------------------------------------- text
def test_a_full_report_has_the_verdict_first(folder, capsys):
    code, out, err = run(capsys, write(folder, "checks.py", PASSES))
    head, relation, assumed, stats, summary = out.splitlines()
    assert (code, err) == (0, "a line of the check\n")
    assert head == "verified: checks.py::passes" and relation == "  out = rank0.out   (equal on all 2 ranks)"
    assert assumed == "  assumed: numbers are real" and stats.startswith("  3 operations on 2 ranks; capture 0.")
    assert summary == "1 verified; all as expected"


def test_a_full_report_names_both_lines_of_a_finding(folder, capsys):
    file = write(folder, "checks.py", UNPROVEN)
    out = run(capsys, file)[1].splitlines()
    assert out[:5] == [
        "unproven (expected verified): checks.py::unproven",
        "  GG201 relation-lost: no clean expression covers mul",
        f"    sequential   checks.py:{line(file, 'x * 2')} (forward)",
        f"    distributed  checks.py:{line(file, 'x * 3')} (forward)",
        "  no lemma for mylib.norm.default",
    ]
    assert out[-1] == "1 unproven; 1 not as expected"


def test_a_refuted_check_shows_the_fault_of_the_ranks(folder, capsys):
    file = write(folder, "checks.py", CAUGHT)
    code, out, _ = run(capsys, file)
    head, finding, where, *_ = out.splitlines()
    assert (
        code == 0 and head == "refuted (as expected): checks.py::caught" and finding.startswith("  GG104 race: a buffer that ")
    )
    assert where == f"    distributed  checks.py:{line(file, '# used')}"


def test_concise_is_a_verdict_and_its_reason(folder, capsys):
    file = write(folder, "checks.py", PASSES, UNPROVEN)
    assert run(capsys, file, "--output-format", "concise")[1].splitlines() == [
        "verified: checks.py::passes",
        "  out = rank0.out   (equal on all 2 ranks)",
        "unproven (expected verified): checks.py::unproven",
        "  GG201 relation-lost: no clean expression covers mul",
        "1 verified, 1 unproven; 1 not as expected",
    ]


def test_quiet_shows_the_unexpected_only(folder, capsys):
    file = write(folder, "checks.py", PASSES, CAUGHT, UNPROVEN)
    code, out, _ = run(capsys, file, "-q")
    assert code == 3 and out.startswith("unproven (expected verified): checks.py::unproven\n") and "passes" not in out
    assert run(capsys, f"{file}::passes", "-q")[:2] == (0, "")


def test_verbose_shows_types(folder, capsys):
    file = write(folder, "checks.py", PASSES, CAUGHT)
    out = run(capsys, file, "-v")[1]
    assert "  out = rank0.out   (equal on all 2 ranks)   : f32[4]\n" in out and "    also         checks.py:" in out


def test_colours_are_for_terminals_that_want_them(folder, capsys, monkeypatch):
    file = write(folder, "checks.py", PASSES)
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "\x1b[" in run(capsys, file)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in run(capsys, file)[1]


def test_progress_is_shown_on_a_terminal_and_cleared(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    err = run(capsys, write(folder, "checks.py", OPEN))[2]
    assert "\r\x1b[Kcaptured rank 1 (" in err and err.endswith("\r\x1b[K")


# ---------------------------------------------------------------------- json
def test_json_has_every_check(folder, capsys):
    file = write(folder, "checks.py", PASSES, UNPROVEN, CAUGHT, BROKEN)
    code, out, _ = run(capsys, file, "--output-format", "json")
    plain = json.loads(out)
    assert code == 2 and plain["version"] == 1
    passes, unproven, caught, broken = plain["checks"]
    assert (passes["name"], passes["file"], passes["verdict"], passes["expect"]) == ("passes", file, "verified", "verified")
    assert passes["relation"]["out"]["text"].startswith("out = rank0.out") and passes["findings"] == []
    assert passes["stats"]["ranks"] == 2 and passes["assumptions"] == ["numbers are real"] and passes["error"] is None
    (finding,) = unproven["findings"]
    assert finding["sequential"] == f"{file}:{line(file, 'x * 2')}" and finding["distributed"].startswith(f"{file}:")
    assert (caught["verdict"], caught["expect"], caught["relation"]) == ("refuted", "refuted", {})
    assert broken["verdict"] is None and broken["error"].endswith("the check broken raised ValueError: no luck")


# ---------------------------------------------------------------------- which checks
def test_a_folder_is_searched(folder, capsys):
    write(folder, "suite/b.py", CAUGHT)
    write(folder, "suite/a.py", PASSES)
    write(folder, "suite/deep/c.py", OPEN)
    write(folder, "suite/.hidden/d.py", BROKEN)
    write(folder, "suite/helpers.py")
    (folder / "suite" / "script.py").write_text("raise SystemExit('imported')")
    assert list(map(str, find_all_checks(["suite"]))) == [
        "suite/a.py::passes", "suite/b.py::caught", "suite/deep/c.py::open_question",
    ]  # fmt: skip
    code, out, _ = run(capsys, "suite")
    assert code == 0 and out.endswith("1 verified, 1 refuted, 1 unproven; all as expected\n")


def test_a_check_that_is_named_twice_runs_once(folder):
    write(folder, "suite/a.py", PASSES, OPEN)
    found = find_all_checks(["suite/a.py::open_question", "suite", os.path.abspath("suite/a.py")])
    assert [check.name for check in found] == ["open_question", "passes"]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("nowhere", "there is no file nowhere"),
        ("nowhere.py", "there is no file nowhere.py"),
        ("bare", "no file below bare has checks; mark a function with @gg.check"),
        ("bare/helpers.py", "bare/helpers.py has no checks; mark a function with @gg.check"),
        ("a.py::nothing", "a.py has no check 'nothing'; it has passes"),
    ],
)
def test_targets_without_checks_are_errors(folder, capsys, target, text):
    write(folder, "a.py", PASSES)
    write(folder, "bare/helpers.py")
    with pytest.raises(UsageError) as caught:
        find_all_checks([target])
    assert str(caught.value) == text
    assert run(capsys, "a.py", target) == (2, "", f"error: {text}\n")


def test_a_file_that_cannot_be_imported_is_an_error(folder):
    write(folder, "suite/a.py", "\nnothing\n")
    with pytest.raises(ProgramError, match="importing the file raised NameError"):
        find_all_checks(["suite"])


@pytest.mark.parametrize("args", [["a.py", "-q", "-v"], [], ["a.py", "--output-format", "xml"]])
def test_wrong_options_have_exit_code_two(folder, capsys, args):
    code, out, err = run(capsys, *args)
    assert code == 2 and out == "" and err and "Traceback" not in err


def test_the_command_runs_as_a_process(folder):
    file = write(folder, "checks.py", CAUGHT)
    code = "from graphguard.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code, "verify", file], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and result.stdout.startswith("refuted (as expected): checks.py::caught\n")


# ---------------------------------------------------------------------- other commands
def test_lemmas_are_listed(capsys, monkeypatch):
    rows = [
        SimpleNamespace(operator="aten.relu", kind="elementwise", definition="max(x, 0)", conditions=()),
        SimpleNamespace(operator="aten._softmax", kind="definition", definition="exp(x) / sum(exp(x))", conditions=("a", "b")),
        SimpleNamespace(operator="aten.mm", kind="index", definition="sum_k x[i, k] w[k, j]", conditions="none"),
    ]
    package, registry = ModuleType("graphguard.lemmas"), ModuleType("graphguard.lemmas.registry")
    registry.rows = lambda: iter(rows)
    monkeypatch.setitem(sys.modules, "graphguard.lemmas", package)
    monkeypatch.setitem(sys.modules, "graphguard.lemmas.registry", registry)
    with pytest.raises(SystemExit) as stop:
        main(["lemmas", "ls"])
    assert not stop.value.code
    assert capsys.readouterr().out.splitlines() == [
        "operator       kind         definition             conditions",
        "aten.relu      elementwise  max(x, 0)",
        "aten._softmax  definition   exp(x) / sum(exp(x))   a; b",
        "aten.mm        index        sum_k x[i, k] w[k, j]  none",
    ]


def test_the_demo_shows_every_verdict(folder, capsys, monkeypatch):
    write(folder, "gallery/a.py", PASSES, UNPROVEN)
    write(folder, "gallery/bugs/b.py", CAUGHT, BROKEN)
    monkeypatch.setattr("graphguard.demo.GALLERY", folder / "gallery")
    with pytest.raises(SystemExit) as stop:
        main(["demo"])
    out = capsys.readouterr().out
    assert stop.value.code == 2 and "passes: out = rank0.out   (equal on all 2 ranks)\n" in out
    assert "unproven: GG201 relation-lost: no clean expression covers mul\n" in out and "caught: GG104 race: " in out
    rows = {words[0]: words[1:] for words in (text.split() for text in out.splitlines()) if len(words) > 2}
    assert rows["passes"][0] == "2" and rows["passes"][2:4] == ["verified", "verified"]
    assert rows["broken"] == ["verified", "error"]


def test_a_finding_prints_where_it_is_relative_to_the_working_folder(folder):
    source = Source(str(folder / "model.py"), 3)
    assert Finding("missing-output", "", sequential=source).to_plain()["sequential"] == "model.py:3"
