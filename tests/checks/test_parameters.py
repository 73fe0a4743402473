"""`@gg.check(mesh=[...])`: a row for each combination, under a name of its own, in every format and in pytest."""

from __future__ import annotations

import enum
import json
import os
import subprocess
import sys
import textwrap
from functools import partial
from xml.etree import ElementTree

import pytest
from harness import command

from graphguard.checks.row import MOST_ROWS, rows_of
from graphguard.errors import UsageError

HEAD = """
import functools
import graphguard as gg
from graphguard.graph.findings import Finding
from graphguard.report.report import Report

def told(**given):
    wrong = given.get("mesh") == {"tp": 4}
    findings = [Finding("race", "a buffer is used too early")] if wrong and given.get("layers") else []
    return Report("refuted" if wrong else "verified", findings=findings, notes=[str(given)])
"""
MATRIX = """
@gg.check(mesh=[{"tp": 2}, {"tp": 4}], layers=[1, 2])
def block(mesh, layers):
    return told(mesh=mesh, layers=layers)

@gg.check
def plain():
    return told()
"""


def write(name, *parts):
    with open(name, "w") as file:
        file.write(HEAD + "".join(textwrap.dedent(part) for part in parts))
    return name


def verify(capfd, *args):
    """Exit code, and by name the verdict or the error."""
    code, out, _ = command(capfd, "verify", *args, "--output-format", "json")
    found = json.loads(out)["checks"]
    return code, {each["name"]: each["verdict"] or each["error"] for each in found}


# ---------------------------------------------------------------------- rows
class Kind(enum.IntEnum):
    RING = 1


def llama():
    pass


@pytest.mark.parametrize(
    ("value", "label"),
    [
        ({"tp": 2}, "tp=2"), ({"dp": 2, "tp": 4}, "dp=2,tp=4"), (2, "p=2"), (-1.5, "p=-1.5"), (True, "p=True"),
        (None, "p=None"), ("gpipe", "p=gpipe"), (llama, "p=llama"), (Kind, "p=Kind"), (Kind.RING, "p=RING"),
        ("two words", "p0"), ("a::b", "p0"),
        ("a]#2", "p0"), ("", "p0"), ({}, "p0"), ({"tp": [1]}, "p0"), ({1: 2}, "p0"), ({"a b": 2}, "p0"), (lambda: 0, "p0"),
        (partial(llama), "p0"), (object(), "p0"), ((1, 2), "p0"), ("x" * 41, "p0"), ("ä", "p0"),
    ],
)  # fmt: skip
def test_a_value_is_named_by_a_word_or_by_its_place(value, label):
    assert [row.label for row in rows_of({"p": [value]})] == [label]


def test_a_dtype_is_named_as_torch_names_it():
    import torch

    assert [row.label for row in rows_of({"dtype": [torch.bfloat16]})] == ["dtype=bfloat16"]


def test_the_last_parameter_changes_fastest():
    assert [row.label for row in rows_of({"a": (1, 2), "b": range(2)})] == ["a=1,b=0", "a=1,b=1", "a=2,b=0", "a=2,b=1"]
    assert [dict(row.values) for row in rows_of({})] == [{}]


@pytest.mark.parametrize("values", [{"tp": 2}, "ab", 4, None, {1, 2}, iter([1])])
def test_what_is_no_list_is_refused(values):
    with pytest.raises(UsageError, match=r"^@gg.check\(p=...\) is \w+; write a list of the values that it takes in turn$"):
        rows_of({"p": values})


def test_no_values_and_too_many_are_refused():
    with pytest.raises(UsageError, match="has no values, so nothing would run"):
        rows_of({"p": []})
    with pytest.raises(UsageError, match="gives 1000000 combinations of values"):
        rows_of({name: range(100) for name in "abc"})
    assert len(rows_of({"a": range(MOST_ROWS)})) == MOST_ROWS


def test_what_a_row_does_to_its_values_is_not_seen_by_others():
    mesh = {"tp": 2, "deep": [1]}
    first, second = rows_of({"mesh": [mesh], "layers": [1, 2]})
    mesh["tp"] = 3
    first.arguments()["mesh"]["deep"].append(2)
    assert first.arguments()["mesh"] == second.arguments()["mesh"] == {"tp": 2, "deep": [1]}


# ---------------------------------------------------------------------- the command line
ROWS = {
    "block[tp=2,layers=1]": "verified", "block[tp=2,layers=2]": "verified",
    "block[tp=4,layers=1]": "refuted", "block[tp=4,layers=2]": "refuted", "plain": "verified",
}  # fmt: skip


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_each_combination_is_a_row_and_is_called_with_its_values(folder, capfd, jobs):
    file = write("a.py", MATRIX)
    assert verify(capfd, file, "-j", jobs) == (1, ROWS)
    _, out, _ = command(capfd, "verify", file, "--output-format", "json", "-j", jobs)
    notes = [each["notes"][0] for each in json.loads(out)["checks"]]
    assert notes[:2] == ["{'mesh': {'tp': 2}, 'layers': 1}", "{'mesh': {'tp': 2}, 'layers': 2}"]


def test_a_name_selects_a_row_or_all_of_them(folder, capfd):
    file = write("a.py", MATRIX)
    assert verify(capfd, f"{file}::block")[1] == {name: ROWS[name] for name in ROWS if name != "plain"}
    assert verify(capfd, f"{file}::block[tp=2,layers=2]") == (0, {"block[tp=2,layers=2]": "verified"})
    assert verify(capfd, f"{file}::block[tp=2,layers=2]", f"{file}::plain")[1].keys() == {"block[tp=2,layers=2]", "plain"}
    for name in ("block[tp=8]", "block[]", "block[tp=2]", "[tp=2,layers=2]", "plain[tp=2]"):
        code, found = verify(capfd, f"{file}::{name}")
        assert code == 2 and found[name] == f"a.py has no check {name!r}; it has {', '.join(ROWS)}"


def test_rows_are_in_every_format(folder, capfd):
    file = write("a.py", MATRIX)
    row = "block[tp=4,layers=1]"
    for form, said in [("full", row), ("concise", row), ("github", row)]:
        code, out, _ = command(capfd, "verify", file, "--output-format", form)
        assert code == 1 and said in out
    code, out, _ = command(capfd, "verify", file, "--output-format", "junit", "--html", "site")
    assert code == 1 and [case.get("name") for case in ElementTree.fromstring(out).iter("testcase")] == list(ROWS)
    assert "block_tp_4_layers_1_.html" in os.listdir("site")
    code, out, _ = command(capfd, "verify", file, "--output-format", "sarif")
    assert code == 1 and len(json.loads(out)["runs"][0]["results"]) == 2


def test_rows_of_one_name_are_told_apart(folder, capfd):
    twice = "\n@gg.check(mesh=[{'tp': 2}, {'tp': 2}])\ndef same(mesh):\n    return told()\n"
    file = write("a.py", twice, twice)
    names = ["same[tp=2]", "same[tp=2]#2", "same[tp=2]#3", "same[tp=2]#4"]
    assert list(verify(capfd, file)[1]) == names
    assert list(verify(capfd, f"{file}::same[tp=2]")[1]) == names == list(verify(capfd, f"{file}::same")[1])
    assert list(verify(capfd, f"{file}::same[tp=2]#3")[1]) == names[2:3]


def test_every_row_has_the_verdict_that_is_expected(folder, capfd):
    file = write("a.py", MATRIX.replace("layers=[1, 2])", 'layers=[1], expect="refuted")'))
    assert verify(capfd, file)[0] == 1  # of tp=2 it is verified
    assert verify(capfd, f"{file}::block[tp=4,layers=1]")[0] == 0


def test_a_row_that_cannot_run_is_an_error_and_the_others_run(folder, capfd):
    body = "\n@gg.check(n=[0, 1])\ndef divides(n):\n    1 / n\n    return told()\n"
    code, found = verify(capfd, write("a.py", body))
    assert code == 2 and found["divides[n=1]"] == "verified"
    assert found["divides[n=0]"].endswith("the check divides[n=0] raised ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("source", "name", "error"),
    [
        (
            "@gg.check(mesh=[1])\ndef c(): ...",
            "import",
            "@gg.check gives c parameters that it does not take: got an",
        ),
        ("@gg.check(mesh=[1])\ndef c(mesh, /): ...", "import", "@gg.check gives c parameters that it does not take: "),
        ("@gg.check(mesh=[])\ndef c(mesh): ...", "import", "@gg.check(mesh=...) has no values, so nothing would run"),
        ("@gg.check(mesh={'tp': 2})\ndef c(mesh): ...", "import", "@gg.check(mesh=...) is dict; write a list of the values"),
        (
            "@gg.check(mesh=[1])\ndef c(mesh, seed): ...",
            "c[mesh=1]",
            "the check c[mesh=1] takes seed too; give @gg.check",
        ),
        ("@gg.check\ndef c(mesh): ...", "c", "the check c takes mesh; a check takes no arguments"),
        ("@gg.check(a=[1])\n@gg.check(b=[1])\ndef c(a, b): ...", "import", "@gg.check marks c twice; mark it once"),
    ],
)
def test_parameters_that_do_not_fit_are_one_sentence(folder, capfd, source, name, error):
    code, found = verify(capfd, write("a.py", source))
    assert code == 2 and found[name].startswith(error)


def test_functions_of_all_kinds_take_parameters(folder, capfd):
    kinds = """
    class Checks:
        @staticmethod
        @gg.check(n=[1])
        def inner(n):
            return told()
        @gg.check(n=[1])
        @staticmethod
        def outer(n):
            return told()
        @gg.check(n=[1])
        def method(self, n):
            return told()
    gg.check(n=[1, 2])(lambda n: told())
    partly = gg.check(n=[1])(functools.partial(lambda m, n: told(), 3))
    @gg.check(n=[1])
    def anything(**given):
        return told(**given)
    """
    code, found = verify(capfd, write("a.py", kinds))
    assert code == 2 and found.pop("Checks.method[n=1]") == (
        "the check Checks.method[n=1] takes self too; give @gg.check a list of values for it"
    )
    names = ["Checks.inner[n=1]", "Checks.outer[n=1]", "lambda[n=1]", "lambda[n=2]", "partly[n=1]", "anything[n=1]"]
    assert found == dict.fromkeys(names, "verified")


# ---------------------------------------------------------------------- pytest
TESTS = """
import pytest

@pytest.fixture
def seed():
    return 7

@gg.check(mesh=[{"tp": 2}, {"tp": 4}])
def test_block(mesh, seed):
    assert seed == 7
    return told(mesh=mesh)

@gg.check(mesh=[{"tp": 4}], expect="refuted")
def test_caught(mesh):
    return told(mesh=mesh)

@gg.check(mesh=[{"tp": 2}])
@pytest.mark.parametrize("more", [2, 0])
def test_both(mesh, more):
    mesh["tp"] += more
    return told(mesh=mesh)
"""


def test_a_test_with_parameters_is_a_test_for_each_row(folder):
    write("test_x.py", TESTS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    arguments = ["-p", "graphguard.pytest_plugin", "-p", "no:cacheprovider", "-q", "-rA", "test_x.py"]
    command = [sys.executable, "-m", "pytest", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    lines = [line.split(" - ")[0].split() for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED"))]
    found = {name.partition("::")[2]: outcome for outcome, name in lines}
    assert found == {
        "test_block[tp=2]": "PASSED", "test_block[tp=4]": "FAILED", "test_caught[tp=4]": "PASSED",
        "test_both[tp=2-2]": "FAILED", "test_both[tp=2-0]": "PASSED",
    }  # fmt: skip
    assert "the check test_block[tp=4] is expected to be verified" in done.stdout
