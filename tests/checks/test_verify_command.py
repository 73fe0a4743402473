"""`graphguard verify`: which checks it finds, how it runs them, what it prints, and its exit codes. The checks make their own
reports, without any program."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from types import ModuleType, SimpleNamespace
from xml.etree import ElementTree

import pytest
from harness import command, line_of

from graphguard.checks import discovery
from graphguard.graph.findings import Finding
from graphguard.graph.ir import Source
from graphguard.render.progress import Progress

HEAD = """
    import os, signal, time
    import graphguard as gg
    from graphguard.engine.proof import Relation
    from graphguard.errors import InternalError
    from graphguard.graph.findings import Finding
    from graphguard.graph.ir import Source
    from graphguard.report.report import OutputRelation, Report

    def seq(x):
        return x * 2

    def par(x):
        return x * 3

    STATS = {"ops": 3, "ranks": 2, "seconds": {"capture": 0.5, "proof": 0.25, "oracle": None}}
    EQUAL = Relation("out", "out = rank0.out   (equal on all 2 ranks)", (("tp", "Replicate"),), "f32[4]")
    LINES = Source(__file__, 11, "seq"), Source(__file__, 14, "par")
    LOST = Finding("relation-lost", "no clean expression covers mul", (), (), *LINES, "forward")
    RACE = Finding("race", "a buffer is used too early", (0, 1), LINES)

    def good():
        return Report("verified", OutputRelation(out=EQUAL), assumptions=["numbers are real"], stats=STATS)

    def lost():
        return Report("unproven", findings=[LOST], opaque=["mylib.norm.default"], stats=STATS)

    def races():
        return Report("refuted", findings=[RACE], stats=STATS)
"""


def check(name, body, expect=None):
    mark = "@gg.check" if expect is None else f"@gg.check(expect={expect!r})"
    return f"\n{mark}\ndef {name}():\n    {body}\n"


PASSES = check("passes", 'print("a line of the check"); return good()')
UNPROVEN = check("unproven", "return lost()")
REFUTED = check("refuted", "return races()")
CAUGHT = check("caught", "return races()", "refuted")
MISSED = check("missed", "return good()", "refuted")
SUSPECTED = check("suspected", "return lost()", "refuted")
OPEN = check("open_question", "return lost()", "unproven")
BROKEN = check("broken", 'raise ValueError("no luck")  # raises')
EMPTY = check("empty", "good()")
STRICT = check("strict", "lost().raise_if_not_verified()")
DEFECT = check("defect", 'raise InternalError("ZeroDivisionError in GraphGuard itself: x; please report it")', "refuted")
DIES = check("dies", "os.kill(os.getpid(), signal.SIGKILL)")
SLEEPS = check("sleeps", "time.sleep(60)")


def write(folder, name, *parts):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(textwrap.dedent(part) for part in (HEAD, *parts)))
    return name


def run(capsys, *args):
    return command(capsys, "verify", *args)


# ---------------------------------------------------------------------- exit codes
CODES = [
    ([PASSES], 0), ([CAUGHT], 0), ([OPEN], 0), ([PASSES, CAUGHT, OPEN], 0), ([UNPROVEN], 3), ([PASSES, UNPROVEN], 3),
    ([REFUTED], 1), ([UNPROVEN, REFUTED], 1), ([MISSED], 1), ([SUSPECTED], 3), ([SUSPECTED, CAUGHT], 3), ([BROKEN], 2),
    ([BROKEN, REFUTED], 2), ([PASSES, BROKEN], 2), ([EMPTY], 2), ([STRICT], 3), ([DEFECT], 2),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "code"), CODES)
def test_the_exit_code_says_whether_every_verdict_is_the_expected_one(folder, capsys, parts, code):
    assert run(capsys, write(folder, "checks.py", *parts))[0] == code


def test_every_check_runs_though_one_cannot(folder, capsys):
    file = write(folder, "checks.py", BROKEN, PASSES)
    code, out, err = run(capsys, file)
    raised = line_of(file, "# raises")
    assert code == 2 and out.startswith("verified: checks.py::passes\n")
    assert out.endswith("1 verified, 1 that could not run; 1 not as expected\n")
    first, frame = [text for text in err.splitlines() if text != "a line of the check"]
    assert first == f"error: checks.py::broken: checks.py:{raised}: the check broken raised ValueError: no luck"
    assert frame.endswith(f'checks.py", line {raised}, in broken')


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (EMPTY, "error: checks.py::empty: the check empty returned NoneType; it must return gg.verify(...)"),
        (DEFECT, "error: checks.py::defect: ZeroDivisionError in GraphGuard itself: x; please report it"),
    ],
)
def test_a_check_that_cannot_run_is_one_line(folder, capsys, source, text):
    code, out, err = run(capsys, write(folder, "checks.py", source), "--output-format", "concise")
    assert (code, out, err) == (2, "1 that could not run; 1 not as expected\n", f"{text}\n")


def test_a_check_cannot_end_the_run_before_the_others(folder, capsys):
    leaves = check("leaves", "os._exit(0)")
    code, out, err = run(capsys, write(folder, "checks.py", leaves, PASSES), "--output-format", "concise")
    assert code == 2 and out.endswith("1 verified, 1 that could not run; 1 not as expected\n")
    assert ": the check leaves called os._exit()\n" in err


def test_nobody_waits_for_a_check_that_is_async(folder, capsys, recwarn):
    source = check("later", "return good()").replace("def later", "async def later")
    code, _, err = run(capsys, write(folder, "checks.py", source))
    assert code == 2 and err == "error: checks.py::later: the check later returned coroutine; it must return gg.verify(...)\n"
    assert not recwarn.list


def test_frames_that_repeat_are_shown_once(folder, capsys):
    source = check("endless", "return endless()")
    code, _, err = run(capsys, write(folder, "checks.py", source))
    assert code == 2 and err.count("  File ") == 1 and err.endswith("in endless  (called by itself 19 times or more)\n")


# ---------------------------------------------------------------------- text
def test_a_full_report_has_the_verdict_first(folder, capsys):
    code, out, err = run(capsys, write(folder, "checks.py", PASSES))
    assert (code, err) == (0, "a line of the check\n")
    assert out.splitlines() == [
        "verified: checks.py::passes",
        "  out = rank0.out   (equal on all 2 ranks)",
        "  assumed: numbers are real",
        "  3 operations on 2 ranks; capture 0.50 s, proof 0.25 s",
        "1 verified; all as expected",
    ]


def test_a_full_report_shows_both_places_of_a_finding(folder, capsys):
    file = write(folder, "checks.py", UNPROVEN)
    assert (line_of(file, "x * 2"), line_of(file, "x * 3")) == (11, 14)
    assert run(capsys, file)[1].splitlines() == [
        "unproven (expected verified): checks.py::unproven",
        "  GG201 relation-lost: no clean expression covers mul",
        "  law: From operands that the ranks hold as copies, tiles or summands must come a result that they hold so.",
        "",
        "  sequential   checks.py:11 in seq (forward)",
        "        10 │ def seq(x):",
        "   >    11 │     return x * 2",
        "  distributed  checks.py:14 in par (forward)",
        "        13 │ def par(x):",
        "   >    14 │     return x * 3",
        "",
        '  no lemma for mylib.norm.default: say what it computes with gg.lemma("mylib::norm", ...)',
        "  next: graphguard explain GG201 says what to do",
        "",
        "  3 operations on 2 ranks; capture 0.50 s, proof 0.25 s",
        "1 unproven; 1 not as expected",
    ]


def test_concise_is_a_verdict_and_its_reason(folder, capsys):
    file = write(folder, "checks.py", PASSES, UNPROVEN, CAUGHT)
    assert run(capsys, file, "--output-format", "concise")[1].splitlines() == [
        "verified: checks.py::passes",
        "  out = rank0.out   (equal on all 2 ranks)",
        "unproven (expected verified): checks.py::unproven",
        "  GG201 relation-lost: no clean expression covers mul",
        "refuted (as expected): checks.py::caught",
        "  GG104 race: a buffer is used too early",
        "1 verified, 1 refuted, 1 unproven; 1 not as expected",
    ]


def test_quiet_shows_the_unexpected_only(folder, capsys):
    file = write(folder, "checks.py", PASSES, CAUGHT, UNPROVEN)
    code, out, _ = run(capsys, file, "-q")
    assert code == 3 and out.startswith("unproven (expected verified): checks.py::unproven\n") and "passes" not in out
    assert "not as expected" not in out
    assert run(capsys, f"{file}::passes", "-q")[:2] == (0, "")


def test_verbose_shows_types_and_ranks(folder, capsys):
    out = run(capsys, write(folder, "checks.py", PASSES, CAUGHT), "-v")[1]
    assert "  out = rank0.out   (equal on all 2 ranks)   : f32[4]\n" in out and "  seen on ranks 0, 1\n" in out


def test_colours_are_for_terminals_that_want_them(folder, capsys, monkeypatch):
    file = write(folder, "checks.py", PASSES)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[" not in run(capsys, file)[1]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run(capsys, file)[1].startswith("\x1b[1;32mverified\x1b[0m: ")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b[" not in run(capsys, file)[1]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in run(capsys, file)[1]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_progress_names_the_check_and_is_cleared(folder, capsys, monkeypatch, processes):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    err = run(capsys, write(folder, "checks.py", OPEN, CAUGHT), "-j", processes)[2]
    assert "\r\x1b[K[............] 0/2  capturing checks.py::open_question" in err and err.endswith("\r\x1b[K")
    assert "capturing checks.py::caught" in err


def test_progress_has_a_bar_for_an_oracle_that_takes_long(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    progress = Progress(stream, 3)
    for phase in [("rank 1", 2, 5), ("proof", 0, 0), ("oracle", 0, 0), ("oracle", 5, 8)]:
        progress.phase("a.py::b", *phase)
    assert stream.getvalue().split("\r\x1b[K[............] 0/3  ")[1:] == [
        "captured rank 1 (2 of 5) in a.py::b", "proving a.py::b", "executing a.py::b", "executing a.py::b #####... 62 %",
    ]  # fmt: skip


# ---------------------------------------------------------------------- formats and files
def test_json_has_every_check(folder, capsys):
    file = write(folder, "checks.py", PASSES, UNPROVEN, CAUGHT, BROKEN)
    code, out, _ = run(capsys, file, "--output-format", "json")
    plain = json.loads(out)
    assert code == 2 and plain["version"] == 1
    passes, unproven, caught, broken = plain["checks"]
    assert (passes["name"], passes["file"], passes["verdict"], passes["expect"]) == ("passes", file, "verified", "verified")
    assert passes["line"] == line_of(file, "def passes():") - 1  # that of the mark
    assert passes["relation"]["out"]["text"].startswith("out = rank0.out") and passes["findings"] == []
    assert passes["stats"]["ranks"] == 2 and passes["assumptions"] == ["numbers are real"] and passes["error"] is None
    (finding,) = unproven["findings"]
    assert (finding["sequential"], finding["distributed"]) == (f"{file}:11", f"{file}:14")
    assert (caught["verdict"], caught["expect"], caught["relation"]) == ("refuted", "refuted", {})
    assert broken["verdict"] is None and broken["error"].endswith("the check broken raised ValueError: no luck")


def test_other_formats_are_on_stdout_alone(folder, capsys):
    file = write(folder, "checks.py", CAUGHT, UNPROVEN)
    code, out, _ = run(capsys, file, "--output-format", "junit")
    assert code == 3 and ElementTree.fromstring(out).get("failures") == "1"
    assert json.loads(run(capsys, file, "--output-format", "sarif")[1])["version"] == "2.1.0"
    out = run(capsys, file, "--output-format", "github")[1]
    assert out.count("\n") == 1 and out.startswith("::warning file=checks.py,line=14,title=GG201 relation-lost::")


def test_a_format_goes_to_a_file_and_the_verdicts_to_stdout(folder, capsys):
    file = write(folder, "checks.py", CAUGHT, UNPROVEN)
    code, out, _ = run(capsys, file, "--output-format", "json", "--output", "deep/report.json")
    assert code == 3 and len(json.loads((folder / "deep/report.json").read_text())["checks"]) == 2
    assert out.splitlines()[0] == "refuted (as expected): checks.py::caught" and out.endswith("; 1 not as expected\n")


def test_text_goes_to_a_file_without_colours(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    run(capsys, write(folder, "checks.py", BROKEN, PASSES), "--output", "report.txt")
    text = (folder / "report.txt").read_text()
    assert text.startswith("error: checks.py::broken: ") and "\nverified: checks.py::passes\n  out = " in text
    assert text.endswith("1 not as expected\n") and "\x1b" not in text


def test_a_file_that_cannot_be_written_is_an_error(folder, capsys):
    file = write(folder, "checks.py", CAUGHT)
    (folder / "taken").write_text("")
    code, _, err = run(capsys, file, "--output", "taken/report.txt")
    assert code == 2 and err.startswith("error: taken/report.txt cannot be written: ")
    assert run(capsys, file, "--html", "taken")[::2] == (2, "error: --html taken: this is a file; give a folder\n")


def test_html_is_a_page_per_check_and_an_index(folder, capsys):
    write(folder, "a.py", CAUGHT, BROKEN)
    write(folder, "b.py", CAUGHT)
    assert run(capsys, "a.py", "b.py", "--html", "site")[0] == 2
    assert sorted(path.name for path in (folder / "site").iterdir()) == ["caught-2.html", "caught.html", "index.html"]
    index = (folder / "site/index.html").read_text()
    assert 'href="caught-2.html">b.py::caught</a>' in index and "ValueError: no luck" in index


# ---------------------------------------------------------------------- processes
def test_outcomes_of_processes_come_in_order(folder, capsys):
    slow = check("slow", "time.sleep(0.5); return good()")
    file = write(folder, "checks.py", slow, PASSES, CAUGHT, BROKEN, UNPROVEN)
    code, out, err = run(capsys, file, "-j", "3", "--output-format", "concise")
    assert code == 2 and [text.split(":")[-1] for text in out.splitlines() if "::" in text] == [
        "slow", "passes", "caught", "unproven",
    ]  # fmt: skip
    assert "error: checks.py::broken: checks.py:" in err and out.endswith("2 not as expected\n")


def test_a_process_that_dies_takes_only_its_own_check_with_it(folder, capsys):
    code, out, err = run(capsys, write(folder, "checks.py", DIES, PASSES, CAUGHT), "-j", "2")
    assert code == 2 and "error: checks.py::dies: the process that ran the check dies ended by signal 9" in err
    assert out.endswith("1 verified, 1 refuted, 1 that could not run; 1 not as expected\n")


@pytest.mark.parametrize("processes", ["1", "2"])
def test_ctrl_c_stops_at_once_and_says_what_was_done(folder, processes, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    write(folder, "checks.py", CAUGHT, SLEEPS, OPEN)
    code = "from graphguard.cli import main; main()"
    arguments = [sys.executable, "-c", code, "verify", "checks.py", "-j", processes]
    terminal, side = pty.openpty()  # Ctrl-C reaches all processes of a terminal
    heeded = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # whatever started the tests may ignore it
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=side, start_new_session=True, preexec_fn=heeded)
    os.close(side)
    assert process.stdout.readline() == b"refuted (as expected): checks.py::caught\n"
    assert b"capturing checks.py::sleeps" in _until(terminal, b"capturing checks.py::sleeps", process)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=40)  # the check would sleep for 60
    told = _until(terminal, b"\0", process)
    assert process.returncode == 130
    assert re.search(rb"interrupted: [12] of 3 checks were done \(1 refuted", told) and b"Traceback" not in told


def _until(terminal, wanted, process):
    told = b""
    end = time.monotonic() + 30
    while wanted not in told and time.monotonic() < end:
        ready, _, _ = select.select([terminal], [], [], 0.2)
        try:
            chunk = os.read(terminal, 4096) if ready else b""
        except OSError:  # the other side is closed
            break
        told += chunk
        if not ready and process.poll() is not None:
            break
    return told


# ---------------------------------------------------------------------- which checks
def test_a_folder_is_searched(folder, capsys):
    write(folder, "suite/b.py", CAUGHT)
    write(folder, "suite/a.py", PASSES)
    write(folder, "suite/deep/c.py", OPEN)
    write(folder, "suite/.hidden/d.py", BROKEN)
    write(folder, "suite/helpers.py")
    (folder / "suite" / "script.py").write_text("raise SystemExit('imported')")
    code, out, err = run(capsys, "suite", "--output-format", "concise")
    assert code == 0 and out.endswith("1 verified, 1 refuted, 1 unproven; all as expected\n")
    assert [text.rpartition(" ")[2] for text in out.splitlines() if "::" in text] == [
        "suite/a.py::passes", "suite/b.py::caught", "suite/deep/c.py::open_question",
    ]  # fmt: skip
    assert err == "skipped: suite/script.py does not use graphguard\n"


def test_a_check_that_is_named_twice_runs_once(folder, capsys):
    write(folder, "suite/a.py", PASSES, OPEN)
    (target,) = discovery.select(["suite/a.py::open_question", "suite", os.path.abspath("suite/a.py")]).targets
    assert (target.file, target.names) == ("suite/a.py", None)
    (target,) = discovery.select(["suite/a.py::passes", "suite/../suite/a.py::open_question"]).targets
    assert target.names == ("passes", "open_question")
    code, out, _ = run(capsys, "suite", "suite/a.py", "suite/a.py::passes")
    assert code == 0 and out.endswith("1 verified, 1 unproven; all as expected\n")


@pytest.mark.parametrize("target", ["nowhere", "nowhere.py", "nowhere.py::name"])
def test_a_path_that_is_not_there_is_an_error_before_anything_runs(folder, capsys, target):
    write(folder, "a.py", PASSES)
    assert run(capsys, "a.py", target) == (2, "", f"error: there is no file {target.partition('::')[0]}\n")


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("bare", "no file below bare has checks; mark a function with @gg.check"),
        ("bare/helpers.py", "bare/helpers.py has no checks; mark a function with @gg.check"),
        ("bare/helpers.py::name", "bare/helpers.py has no check 'name'; it has none"),
        ("a.py::nothing", "a.py has no check 'nothing'; it has passes"),
        ("bad.py", "bad.py:31: importing the file raised NameError: name 'nothing' is not defined"),
    ],
)
def test_targets_without_checks_are_errors_beside_what_runs(folder, capfd, target, text):
    write(folder, "a.py", PASSES)
    write(folder, "b.py", CAUGHT)
    write(folder, "bad.py", "\nnothing\n")
    write(folder, "bare/helpers.py")
    code, out, err = run(capfd, "b.py", target, "--output-format", "json")
    *others, entry = json.loads(out)["checks"]
    assert code == 2 and [each["verdict"] for each in others] == ["refuted"]
    assert (entry["verdict"], entry["error"], entry["file"]) == (None, text, target.partition("::")[0])
    assert err.splitlines()[0].removeprefix("error: ").removeprefix("a.py::nothing: ").removeprefix(f"{target}: ") == text


@pytest.mark.parametrize("args", [["a.py", "-q", "-v"], [], ["a.py", "--output-format", "xml"], ["a.py", "-j", "0"]])
def test_wrong_options_have_exit_code_two(folder, capsys, args):
    code, out, err = run(capsys, *args)
    assert code == 2 and out == "" and err and "Traceback" not in err


def test_the_command_runs_as_a_process(folder):
    file = write(folder, "checks.py", CAUGHT)
    code = "from graphguard.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code, "verify", file], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and result.stdout.startswith("refuted (as expected): checks.py::caught\n")


def _closed_pipe():
    read, write_end = os.pipe()
    os.close(read)
    return write_end


@pytest.mark.parametrize(
    ("stdout", "text"),
    [
        (_closed_pipe, b""),
        (partial(os.open, "/dev/full", os.O_WRONLY), b"error: the results cannot be written: No space left on device\n"),
    ],
)
@pytest.mark.parametrize("form", ["concise", "json"])
def test_results_that_cannot_be_written_are_an_error(folder, stdout, text, form):
    code = "from graphguard.cli import main; main()"
    arguments = [sys.executable, "-c", code, "verify", write(folder, "checks.py", CAUGHT), "--output-format", form]
    opened = stdout()
    done = subprocess.run(arguments, stdout=opened, stderr=subprocess.PIPE, timeout=120)
    os.close(opened)
    assert (done.returncode, done.stderr) == (2, text)


def test_a_closed_stream_is_no_traceback(folder):
    file = write(folder, "checks.py", CAUGHT)
    command = f"{sys.executable} -c 'from graphguard.cli import main; main()' verify {file}"
    done = subprocess.run(["sh", "-c", f"{command} >&-"], stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith(b"error: stdout is closed, so there is no place for results; ")
    done = subprocess.run(["sh", "-c", f"{command} 2>&-"], stdout=subprocess.PIPE, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith(b"refuted (as expected): checks.py::caught\n")


# ---------------------------------------------------------------------- other commands
def test_lemmas_are_listed(capsys, monkeypatch):
    rows = [
        SimpleNamespace(operator="aten.relu", kind="elementwise", definition="max(x, 0)", conditions=()),
        SimpleNamespace(operator="aten._softmax", kind="definition", definition="exp(x) / sum(exp(x))", conditions=("a", "b")),
        SimpleNamespace(operator="aten.mm", kind="index", definition="sum_k x[i, k] w[k, j]", conditions="none"),
    ]
    package, known = ModuleType("graphguard.lemmas"), ModuleType("graphguard.lemmas.known")
    known.rows = lambda: iter(rows)
    monkeypatch.setitem(sys.modules, "graphguard.lemmas", package)
    monkeypatch.setitem(sys.modules, "graphguard.lemmas.known", known)
    code, out, _ = command(capsys, "lemmas", "ls")
    assert code == 0 and out.splitlines() == [
        "operator       kind         definition             conditions",
        "aten.relu      elementwise  max(x, 0)",
        "aten._softmax  definition   exp(x) / sum(exp(x))   a; b",
        "aten.mm        index        sum_k x[i, k] w[k, j]  none",
    ]


@pytest.mark.parametrize("name", ["GG104", "gg104", "race"])
def test_a_finding_is_explained_by_code_or_kind(capsys, name):
    code, out, _ = command(capsys, "explain", name)
    assert code == 0 and out.startswith("GG104 race\n\nA buffer is used between the start of asynchronous communication ")
    assert "\nWhy it is a law\n" in out and "\nExample\n    def seq(x):\n" in out and "\nWhat to do\n  Wait before " in out


def test_a_lemma_of_the_users_own_is_explained_from_its_file(folder, capsys):
    source = """
    import torch
    @torch.library.custom_op("gg_cli::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2
    double.register_fake(torch.empty_like)
    gg.lemma("gg_cli::double", "... h -> ... h")
    """
    file = write(folder, "lemmas.py", textwrap.dedent(source))
    assert command(capsys, "explain", "gg_cli::double", file)[:2] == (
        0,
        "gg_cli::double (a lemma of yours)\n\n  Its rule is ... h -> ... h.\n  A rank may hold any part of each operand.\n"
        "  This held in 56 random cases.\n",
    )
    code, _, err = command(capsys, "explain", "gg_cli::double")
    assert code == 2 and err.endswith("name its file too: graphguard explain gg_cli::double FILE.py\n")


@pytest.mark.parametrize("name", ["aten.mm.default", "aten::mm", "aten.mm", "mm"])
def test_a_lemma_is_explained_by_its_operator(capsys, name):
    code, out, _ = command(capsys, "explain", name)
    assert code == 0 and out.startswith("aten.mm.default (contraction)\n\n  It computes: mk, kn -> mn\n")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("GG20", "error: there is no finding and no lemma 'GG20'; is it GG206 or "),
        ("softmx", "error: there is no finding and no lemma 'softmx'; is it aten._softmax.default or "),
        ("xyzzy", "error: there is no finding and no lemma 'xyzzy'; graphguard lemmas ls lists the lemmas, and the codes are "),
    ],
)
def test_what_is_unknown_is_one_sentence_with_close_matches(capsys, name, text):
    code, out, err = command(capsys, "explain", name)
    assert (code, out) == (2, "") and err.startswith(text) and err.count("\n") == 1


def test_a_finding_prints_where_it_is_relative_to_the_working_folder(folder):
    source = Source(str(folder / "model.py"), 3)
    assert Finding("missing-output", "", sequential=source).to_plain()["sequential"] == "model.py:3"
