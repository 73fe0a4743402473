"""The package from outside: what importing it costs, what it offers, and the command line."""

from __future__ import annotations

import importlib.resources
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from importlib import metadata

import pytest
from harness import ROOT, command, line_of, python

import graphguard
from graphguard.checks.discovery import find_checks
from graphguard.errors import ProgramError, UsageError
from graphguard.graph import json as graph_json

# ---------------------------------------------------------------------- importing
HEAVY = ("torch", "jax", "numpy", "typer", "rich", "transformers")


@pytest.mark.parametrize("code", ["import graphguard",
                                  "import graphguard.graph.ir, graphguard.graph.json, graphguard.graph.wellformed",
                                  "import graphguard; graphguard.check; graphguard.CaptureError; dir(graphguard)"])  # fmt: skip
def test_importing_needs_no_framework(code):
    loaded = set(python(f"{code}\nimport sys\nprint(*sys.modules)").split())
    assert "graphguard" in loaded and not loaded & set(HEAVY)


def test_a_placement_loads_torch_when_it_is_used():
    assert python("import graphguard, sys; graphguard.Shard(0); print('torch' in sys.modules)").strip() == "True"


def test_every_public_name_resolves():
    for name in graphguard.__all__:
        assert getattr(graphguard, name) is not None and name in dir(graphguard)
    assert sorted(graphguard.__all__) == sorted(graphguard._HOMES)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'graphguard' has no attribute 'nothing'"):
        graphguard.nothing  # noqa: B018


def test_without_torch_the_error_says_what_to_install():
    code = """
        import importlib.util, graphguard
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
        try:
            graphguard.verify
        except ImportError as error:
            print(error)
    """
    assert python(textwrap.dedent(code)).strip() == (
        "graphguard.verify needs PyTorch; install it with `pip install graphguard[torch]`"
    )


def test_tests_stand_in_the_rooms_that_they_test():
    rooms = {file.parent.name for file in (ROOT / "graphguard").glob("*/__init__.py")}
    folders = {file.parent.name for file in (ROOT / "tests").glob("*/test_*.py")}
    assert {"engine", "soundness"} <= folders <= rooms | {"soundness"}


def test_libraries_of_the_extra_are_pinned_and_where_ci_runs_they_are_installed():
    """Tests of a library that is not installed are skipped: in CI, which sets the variable, none may be."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["libraries"]
    names = {re.split("[>=<]", each)[0] for each in extra}
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert names <= pins.keys() and len(names) > 5
    if os.environ.get("GRAPHGUARD_TEST_LIBRARIES") == "all":
        assert {name: metadata.version(name) for name in names} == {name: pins[name] for name in names}


def test_types_are_shipped():
    assert (importlib.resources.files("graphguard") / "py.typed").is_file()


# ---------------------------------------------------------------------- checks
CHECKS = """
    import torch
    import torch.distributed as dist
    import graphguard as gg

    def seq(x, w):
        return x @ w

    def par(x, w):
        y = x @ w  # product
        dist.all_reduce(y)
        return y

    INPUTS = {"x": gg.Input((4, 6), gg.Shard(1)), "w": gg.Input((6, 3), gg.Shard(0))}

    @gg.check
    def good():
        return gg.verify(seq, par, mesh={"tp": 2}, inputs=INPUTS)

    @gg.check(expect="refuted")
    def reads():
        return gg.verify(seq, lambda x, w: x * x.sum().item(), mesh={"tp": 2}, inputs=INPUTS)  # reads

    @gg.check
    def raises():
        raise ValueError("no\\nluck")  # raises

    @gg.check
    def leaves():
        raise SystemExit(0)  # leaves

    @gg.check
    def twice():
        good()
        return good()

    @gg.check
    def fails_inside():
        return gg.verify(lambda x, w: helper(x), par, mesh={"tp": 2}, inputs=INPUTS)

    def helper(x):
        return x.view(7)  # helper

    def not_a_check():
        pass
"""


@pytest.fixture
def file(folder):
    (folder / "model_checks.py").write_text(textwrap.dedent(CHECKS))
    return "model_checks.py"


def line(file, mark):
    return line_of(file, f"# {mark}")


def test_checks_are_found_in_the_order_of_the_file(file):
    names = ["good", "reads", "raises", "leaves", "twice", "fails_inside"]
    assert [(check.name, check.expect) for check in find_checks(file)] == [
        (name, "refuted" if name == "reads" else "verified") for name in names
    ]
    assert [check.name for check in find_checks(f"{file}::reads")] == ["reads"]
    with pytest.raises(UsageError, match=r"has no check ''; it has good, "):
        find_checks(f"{file}::")


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        ("\nnothing", ProgramError, "bad.py:2: importing the file raised NameError: name 'nothing' is not defined"),
        ("x = (", ProgramError, "bad.py:1: importing the file raised SyntaxError: '(' was never closed"),
        ("import sys\nsys.exit(0)", ProgramError, "bad.py:2: importing the file called sys.exit()"),
        ("import os\nos._exit(0)", ProgramError, "bad.py:2: importing the file called os._exit()"),
        ("x = 1", UsageError, "bad.py has no checks; mark a function with @gg.check"),
        ("import graphguard as gg\n@gg.check(expect='perfect')\ndef a(): ...", UsageError,
         "@gg.check(expect='perfect'): the verdict is one of verified, refuted, unproven"),
    ],
)  # fmt: skip
def test_files_without_checks_are_errors_in_words(file, tmp_path, source, error, text):
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(error) as caught:
        find_checks("bad.py")
    assert str(caught.value) == text
    assert error is UsageError or "bad" not in sys.modules


def test_a_file_named_like_a_module_takes_nobodys_place(file, tmp_path):
    import json as original

    (tmp_path / "json.py").write_text("import graphguard as gg\n@gg.check\ndef a(): ...")
    assert [check.name for check in find_checks("json.py")] == ["a"]
    assert sys.modules["json"] is original


def test_files_of_one_name_in_two_folders_are_two_modules(file, tmp_path):
    found = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(f"import graphguard as gg\n@gg.check\ndef {folder}(): ...")
        found += find_checks(f"{folder}/same.py")
    assert [check.name for check in found] == ["one", "two"]
    assert [check.name for check in find_checks("one/same.py")] == ["one"]


# ---------------------------------------------------------------------- the command line
def test_capture_shows_every_graph(file, capsys):
    code, out, err = command(capsys, "capture", f"{file}::good")
    assert (code, err) == (0, "")
    product = f"model_checks.py:{line(file, 'product')}"
    assert out.startswith("graph sequential\n  input x = %0: f32[4, 6]\n  input w = %1: f32[6, 3]\n")
    for rank in (0, 1):
        assert f"\n\ngraph rank {rank} on tp=2\n  input x = %0: f32[4, 3]\n  input w = %1: f32[3, 3]\n" in out
    assert out.count(f"%2: f32[4, 3] = aten.mm(%0, %1)  # {product}\n") == 2
    assert out.count("dist.all_reduce(%2, reduce='sum', group=[0, 1], work=1)") == 2


def test_capture_shows_one_rank_or_the_sequential_program(file, capsys):
    code, out, _ = command(capsys, "capture", f"{file}::good", "--rank", "1")
    assert code == 0 and out.startswith("graph rank 1 on tp=2\n") and out.count("graph ") == 1
    code, out, _ = command(capsys, "capture", f"{file}::good", "--sequential")
    assert code == 0 and out.startswith("graph sequential\n") and out.count("graph ") == 1


def test_capture_writes_json_that_loads(file, capsys):
    code, out, err = command(capsys, "capture", f"{file}::good", "--output-format", "json")
    graphs = [graph_json.from_plain(plain) for plain in json.loads(out)]
    assert (code, err) == (0, "") and [graph.name for graph in graphs] == ["sequential", "rank 0", "rank 1"]


ERRORS = {
    "reads": "error: rank 0: model_checks.py:{line}: the program reads the value of a tensor that depends on the input 'x'; ",
    "raises": "error: model_checks.py:{line}: the check raises raised ValueError: no\n",
    "leaves": "error: model_checks.py:{line}: the check leaves called sys.exit()\n",
    "twice": "error: the check twice calls gg.verify 2 times; it must call it once\n",
    "nothing": "error: model_checks.py has no check 'nothing'; it has good, reads, raises, leaves, twice, fails_inside\n",
}


@pytest.mark.parametrize("check", ERRORS)
def test_an_error_is_one_line_and_exit_code_two(file, capsys, check):
    code, out, err = command(capsys, "capture", f"{file}::{check}")
    assert (
        code == 2 and out == "" and err.startswith(ERRORS[check].format(line=line(file, check) if "{" in ERRORS[check] else 0))
    )
    assert "Traceback" not in err and [text for text in err.splitlines()[1:] if not text.startswith("  File ")] == []


def test_an_exception_of_a_program_is_shown_with_the_users_frames(file, capsys):
    code, _, err = command(capsys, "capture", f"{file}::fails_inside")
    first, *frames = err.splitlines()
    assert code == 2 and first.startswith("error: the sequential program raised RuntimeError at ")
    assert len(frames) == 2 and f'model_checks.py", line {line(file, "helper")}, in helper' in frames[-1]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (
            ["model_checks.py"],
            "error: model_checks.py has 6 checks; choose one: ::good, ::reads, ::raises, ::leaves, ::twice, ",
        ),
        (["nowhere.py::a"], "error: there is no file nowhere.py\n"),
        (["model_checks.py::good", "--rank", "2"], "error: there is no rank 2: the mesh tp=2 has ranks 0 to 1\n"),
        (["model_checks.py::good", "--rank", "-1"], "error: there is no rank -1: the mesh tp=2 has ranks 0 to 1\n"),
        (["model_checks.py::good", "--rank", "0", "--sequential"], "error: give --rank or --sequential, not both\n"),
    ],
)
def test_usage_errors_are_one_line_and_exit_code_two(file, capsys, args, text):
    code, out, err = command(capsys, "capture", *args)
    assert code == 2 and out == "" and err.startswith(text) and err.count("\n") == 1


@pytest.mark.parametrize("args", [["capture"], ["captur"], ["capture", "a.py", "--output-format", "xml"], ["bench", "nothing"]])
def test_a_wrong_command_has_exit_code_two(file, capsys, args):
    code, out, err = command(capsys, *args)
    assert code == 2 and out == "" and "Traceback" not in err and err


def test_the_version_is_printed(capsys):
    assert command(capsys, "--version") == (0, f"graphguard {graphguard.__version__}\n", "")


def test_a_defect_of_ours_is_an_error_not_a_verdict(file, capsys, monkeypatch):
    monkeypatch.setattr("graphguard.capture.torch.front.capture", lambda *args, **kwargs: 1 // 0)
    code, out, err = command(capsys, "capture", f"{file}::good")
    assert code == 2 and out == ""
    assert err == "error: ZeroDivisionError in GraphGuard itself: integer division or modulo by zero; please report it\n"


def test_the_command_runs_as_a_process(file):
    code = "import sys; from graphguard.cli import main; sys.argv[0] = 'graphguard'; main()"
    result = subprocess.run(
        [sys.executable, "-c", code, "capture", f"{file}::reads"], capture_output=True, text=True, timeout=120
    )
    assert (
        result.returncode == 2
        and result.stdout == ""
        and result.stderr.startswith(f"error: rank 0: model_checks.py:{line(file, 'reads')}: ")
    )


@pytest.mark.parametrize("output_format", ["text", "json"])
def test_capture_of_ranks_that_do_not_fit_together_exits_with_one(output_format, capsys):
    target = f"{ROOT / 'examples' / 'bugs' / 'read_before_wait.py'}::buggy"
    code, out, err = command(capsys, "capture", target, "--rank", "0", "--output-format", output_format)
    assert code == 1 and "GG104 race: a buffer that dist.all_reduce" in err and "GG104" not in out.splitlines()[0]
