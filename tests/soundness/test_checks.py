"""Every check that is marked runs, and every report that is made counts; what does not is an error, and never exit code 0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from xml.etree import ElementTree

import pytest
from harness import command

HEAD = """
    import functools, os, sys
    import graphguard as gg
    from graphguard import Shard
    from graphguard.testing import assert_refines

    def seq(x):
        return x * 2

    def wrong(x):
        return x * 3

    OPTIONS = dict(mesh={"tp": 2}, inputs={"x": gg.Input((2,), Shard(0))}, trials=1)

    def good():
        return gg.verify(seq, seq, **OPTIONS)

    def bad():
        return gg.verify(seq, wrong, **OPTIONS)
"""


def write(name, *parts, head=HEAD):
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    with open(name, "w") as file:
        file.write("\n".join(textwrap.dedent(part) for part in (head, *parts)))
    return name


def verify(capfd, *args):
    """Exit code; {file::name: verdict or error}; stderr."""
    code, out, err = command(capfd, "verify", *args, "--output-format", "json")
    for name, module in list(sys.modules.items()):  # each run begins without those of the last one
        if str(getattr(module, "__file__", "")).startswith(os.getcwd()):
            del sys.modules[name]
    found = json.loads(out)["checks"]
    names = [f"{each['file']}::{each['name']}" for each in found]
    assert len(set(names)) == len(names)
    return code, {name: each["verdict"] or each["error"] for name, each in zip(names, found, strict=True)}, err


# ---------------------------------------------------------------------- reports
DROPPED = [
    ("bad(); return good()", "makes 2 reports; a check makes one and returns it, so write one check for each"),
    ("good(); return good()", "makes 2 reports; a check makes one and returns it, so write one check for each"),
    ("return [good(), bad()]", "makes 2 reports; a check makes one and returns it, so write one check for each"),
    ("return [good()]", "returned list; it must return gg.verify(...)"),
    ("bad()", "returned NoneType; it must return gg.verify(...)"),
    ("bad(); return KEPT", "makes a report and returns another; return the one that it makes"),
    ("yield good()", "returned generator; it must return gg.verify(...)"),
    ("return True", "returned bool; it must return gg.verify(...)"),
    (
        "gg.check(good); return good()",
        "marks good as a check while it runs, which is too late; mark it where the file is imported",
    ),
]
CAUGHT = """
    @gg.check
    def c():
        try:
            gg.verify(seq, seq, mesh={"tp": 0}, inputs={})
        except Exception:
            pass
        return KEPT
"""


@pytest.mark.parametrize(("body", "error"), DROPPED)
def test_a_check_makes_one_report_and_returns_it(folder, capfd, body, error):
    file = write("a.py", "KEPT = good()", f"@gg.check\ndef c():\n    {body}\n")
    assert verify(capfd, file)[:2] == (2, {"a.py::c": f"the check c {error}"})


def test_an_error_that_a_check_catches_counts(folder, capfd):
    code, found, _ = verify(capfd, write("a.py", "KEPT = good()", CAUGHT))
    assert code == 2 and found["a.py::c"].startswith("the check c catches an error of gg.verify, so a report is missing: ")


def test_a_report_of_another_place_may_be_returned(folder, capfd):
    file = write("a.py", "KEPT = good()", "@gg.check\ndef c():\n    return KEPT\n")
    assert verify(capfd, file)[:2] == (0, {"a.py::c": "verified"})


def test_a_report_that_a_file_drops_while_it_is_imported_counts(folder, capfd):
    check = "@gg.check\ndef c():\n    return good()\n"
    assert verify(capfd, write("a.py", check, "good()"))[0] == 0
    code, found, _ = verify(capfd, write("b.py", check, "bad()"))
    assert code == 2 and found == {
        "b.py::import": "b.py drops a report while it is imported, which is refuted; call gg.verify inside of a check",
        "b.py::c": "verified",
    }


def test_what_raises_unless_it_is_verified_has_its_verdict(folder, capfd):
    file = write(
        "a.py",
        """
        @gg.check
        def asserts():
            return assert_refines(seq, seq, **OPTIONS)
        @gg.check
        def fails():
            assert_refines(seq, wrong, **OPTIONS)
            return good()
        @gg.check
        def raises():
            bad().raise_if_not_verified()
        @gg.check(expect="refuted")
        def contradicts():
            assert_refines(seq, wrong, **OPTIONS)
        """,
    )
    code, found, _ = verify(capfd, file)
    assert code == 2 and found == {
        "a.py::asserts": "verified",
        "a.py::fails": "refuted",
        "a.py::raises": "refuted",
        "a.py::contradicts": "the check contradicts expects refuted, but raises unless it is verified; "
        "return gg.verify(...) instead",
    }
    assert verify(capfd, f"{file}::fails")[0] == 1


def test_a_fork_that_a_check_forgets_does_not_go_on_with_the_run(folder, capfd):
    file = write("a.py", "@gg.check\ndef c():\n    return good() if os.fork() else None\n")
    assert verify(capfd, file)[:2] == (0, {"a.py::c": "verified"})


@pytest.mark.parametrize(
    "call", ["sys.exit(0)", "os._exit(0)", "__import__('posix')._exit(0)", "os.execvp('true', ['true'])", "exit()"]
)
@pytest.mark.parametrize("others", [(), ("b.py",)])
def test_nothing_ends_the_run(folder, capfd, call, others):
    files = [write("a.py", f"@gg.check\ndef c():\n    {call}\n"), *(write(each, call) for each in others)]
    code, found, _ = verify(capfd, *files)
    assert code == 2 and " called " in found["a.py::c"]
    assert all(" importing the file called " in found[f"{each}::import"] for each in others)


# ---------------------------------------------------------------------- marks
MARKS = """
    def make(number):
        @gg.check
        def made():
            return good() if number else bad()
        return None

    for number in range(3):
        make(number)
    known = gg.check(lambda: bad())
    CHECKS = [gg.check(lambda: good()), gg.check(functools.partial(gg.verify, seq, wrong, **OPTIONS))]

    class Checks:
        @gg.check
        def method(self):
            return good()
        @staticmethod
        @gg.check
        def inner():
            return bad()
        @gg.check
        @staticmethod
        def outer():
            return bad()

    @gg.check
    def same():
        return bad()

    @gg.check
    def same():
        return good()

    @gg.check
    async def later():
        return bad()

    @gg.check
    def lost():
        return bad()

    del lost
    exec("@gg.check\\ndef written():\\n    return bad()\\n")
    gg.check(expect="refuted")(bad)
"""


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_check_runs_wherever_it_is_kept(folder, capfd, jobs):
    code, found, _ = verify(capfd, write("a.py", MARKS), "-j", jobs)
    assert code == 2 and found == {
        "a.py::made": "refuted", "a.py::made#2": "verified", "a.py::made#3": "verified",
        "a.py::known": "refuted", "a.py::lambda": "verified", "a.py::verify": "refuted",
        "a.py::Checks.method": "the check Checks.method takes self; a check takes no arguments",
        "a.py::Checks.inner": "refuted", "a.py::Checks.outer": "refuted",
        "a.py::same": "refuted", "a.py::same#2": "verified",
        "a.py::later": "the check later returned coroutine; it must return gg.verify(...)",
        "a.py::lost": "refuted", "a.py::written": "refuted", "a.py::bad": "refuted",
    }  # fmt: skip


def test_a_name_selects_all_that_have_it(folder, capfd):
    file = write("a.py", MARKS)
    assert verify(capfd, f"{file}::same")[:2] == (1, {"a.py::same": "refuted", "a.py::same#2": "verified"})
    assert verify(capfd, f"{file}::same#2")[:2] == (0, {"a.py::same#2": "verified"})
    assert verify(capfd, f"{file}::nope", f"{file}::bad")[0] == 2


@pytest.mark.parametrize(
    ("mark", "error"),
    [
        ("gg.check(good); gg.check(good)", "@gg.check marks good twice; mark it once"),
        ("gg.check(3)", "@gg.check marks a function, not int"),
        ("gg.check(classmethod(good))", "@gg.check marks a function, not classmethod"),
        (
            "gg.check(expect='Verified')(good)",
            "@gg.check(expect='Verified'): the verdict is one of verified, refuted, unproven",
        ),
    ],
)
def test_a_mark_that_cannot_be_is_an_error_of_the_file(folder, capfd, mark, error):
    code, found, err = verify(capfd, write("a.py", mark))
    assert (code, found) == (2, {"a.py::import": error}) and err == f"error: a.py::import: {error}\n"


def test_the_checks_of_what_a_file_imports_run_with_it_and_once(folder, capfd):
    write("common.py", "@gg.check\ndef shared():\n    return bad()\n")
    write("a.py", "import common\n@gg.check\ndef a():\n    return good()\n")
    write("b.py", "from common import shared\n@gg.check\ndef b():\n    return good()\n")
    assert verify(capfd, "a.py")[:2] == (1, {"common.py::shared": "refuted", "a.py::a": "verified"})
    everything = {"a.py::a": "verified", "b.py::b": "verified", "common.py::shared": "refuted"}
    assert verify(capfd, "a.py", "b.py")[:2] == (1, everything)
    assert verify(capfd, ".")[:2] == (1, everything)


# ---------------------------------------------------------------------- files of a folder
def test_files_of_a_folder_that_lead_to_graphguard_are_imported(folder, capfd):
    hidden = "@h.check\ndef c():\n    return h.bad()\n"
    write("suite/tools/gg_helpers.py", "from graphguard import check")
    write("suite/direct.py", "from tools import gg_helpers as h", hidden, head="")
    write("suite/tools/beside.py", "import json, gg_helpers as h", hidden, head="")
    write("suite/tools/further.py", "from beside import h", hidden, head="")
    write("suite/package/__init__.py", head="")
    write("suite/package/helpers.py", "from graphguard import check")
    write("suite/package/sub/__init__.py", head="")
    write("suite/package/sub/relative.py", "from .. import helpers as h", hidden, head="")
    write(
        "suite/package/sub/names.py",
        "from ..helpers import (  # a\n    check, bad)\n@check\ndef c():\n    return bad()\n",
        head="",
    )
    write("suite/script.py", "raise SystemExit('imported')", head="")
    write("suite/__main__.py", "import graphguard; raise SystemExit('imported')", head="")
    write("suite/.hidden/d.py", "gg.check(bad)")
    code, found, err = verify(capfd, "suite")
    assert code == 1 and found == {
        "suite/direct.py::c": "refuted",
        "suite/tools/beside.py::c": "refuted",
        "suite/tools/further.py::c": "refuted",
        "suite/package/sub/relative.py::c": "refuted",
        "suite/package/sub/names.py::c": "refuted",
    }
    assert "skipped: suite/script.py does not use graphguard\n" in err
    assert "skipped: suite/__main__.py is a program of its own\n" in err


def test_links_are_followed_once(folder, capfd):
    write("elsewhere/c.py", "gg.check(bad)")
    write("suite/a.py", "gg.check(good)")
    os.symlink("../elsewhere", "suite/linked")
    os.symlink("../elsewhere", "suite/linked_again")
    os.symlink("..", "suite/circle")
    os.symlink("../elsewhere/c.py", "suite/z.py")
    code, found, _ = verify(capfd, "suite")
    assert code == 1 and sorted(found.values()) == ["refuted", "verified"]


def test_a_file_in_another_encoding_is_read_as_python_reads_it(folder, capfd):
    write("suite/a.py")
    with open("suite/a.py", "rb") as file:
        text = file.read()
    with open("suite/latin.py", "wb") as file:
        file.write(b"# -*- coding: latin-1 -*-\nNAME = '\xe9'\n" + text + b"\ngg.check(bad)\n")
    with open("suite/broken.py", "wb") as file:
        file.write(b"NAME = '\xe9'\n" + text + b"\ngg.check(bad)\n")
    code, found, _ = verify(capfd, "suite")
    assert code == 2 and found["suite/latin.py::bad"] == "refuted"
    assert "importing the file raised SyntaxError" in found["suite/broken.py::import"]


def test_files_and_helpers_of_one_name_are_not_taken_for_each_other(folder, capfd):
    for name in ("one", "two"):
        write(f"{name}/helper.py", f"PROGRAM = {'seq' if name == 'one' else 'wrong'}")
        write(f"{name}/c.py", "import helper\ngg.check(lambda: gg.verify(seq, helper.PROGRAM, **OPTIONS))")
    expected = {"one/c.py::lambda": "verified", "two/c.py::lambda": "refuted"}
    assert verify(capfd, "one", "two")[:2] == (1, expected)
    assert verify(capfd, "two", "one", "-j", "2")[:2] == (1, expected)


# ---------------------------------------------------------------------- files that fail
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_file_that_cannot_be_imported_is_an_entry_in_every_format(folder, capfd, jobs):
    write("suite/a.py", "gg.check(good)")
    write("suite/b.py", "gg.check(bad)", "nothing")
    write("suite/c.py", "import signal; os.kill(os.getpid(), signal.SIGKILL)")
    write("suite/d.py", "gg.check(good)")
    code, found, err = verify(capfd, "suite", "-j", jobs)
    assert code == 2 and list(found) == ["suite/a.py::good", "suite/b.py::import", "suite/c.py::import", "suite/d.py::good"]
    assert found["suite/b.py::import"] == "suite/b.py:22: importing the file raised NameError: name 'nothing' is not defined"
    assert found["suite/c.py::import"] == "suite/c.py: the process that imported the file ended by signal 9"
    assert f"error: {found['suite/b.py::import']}\n" in err
    for form in ("junit", "sarif", "github", "full"):
        code, out, _ = command(capfd, "verify", "suite", "--output-format", form, "-j", jobs)
        assert code == 2
        if form == "junit":
            assert ElementTree.fromstring(out).get("errors") == "2"
        elif form == "sarif":
            (invocation,) = json.loads(out)["runs"][0]["invocations"]
            assert not invocation["executionSuccessful"] and len(invocation["toolExecutionNotifications"]) == 2
        elif form == "github":
            assert out.count("::error file=suite/") == 2 and "::error file=suite/b.py,line=22,title=" in out
        else:
            assert out.endswith("2 verified, 2 that could not run; 2 not as expected\n")


def test_a_check_that_kills_its_process_leaves_the_others_of_its_file(folder, capfd):
    file = write("a.py", "@gg.check\ndef dies():\n    os.kill(os.getpid(), 9)\n", "gg.check(bad); gg.check(good)")
    code, found, _ = verify(capfd, file, "-j", "2")
    assert code == 2 and found["a.py::dies"] == "the process that ran the check dies ended by signal 9"
    assert (found["a.py::bad"], found["a.py::good"]) == ("refuted", "verified")


def test_an_error_of_a_class_of_the_users_own_reaches_the_report(folder, capfd):
    file = write("a.py", "class Mine(gg.UsageError): ...\n@gg.check\ndef c():\n    raise Mine('no luck')\n")
    assert verify(capfd, file, "-j", "2")[:2] == (2, {"a.py::c": "no luck"})


def test_what_a_report_has_of_the_users_own_is_not_imported_by_the_parent(folder, capfd):
    own = "class Mine(str): ...\n@gg.check\ndef c():\n    report = good()\n    report.notes.append(Mine())\n    return report\n"
    expected = {"a.py::c": "the report of c cannot be read: it has a Mine, which only a knows"}
    assert verify(capfd, write("a.py", own), "-j", "2")[:2] == (2, expected)


# ---------------------------------------------------------------------- lemmas
OPERATOR = """
    import torch
    @torch.library.custom_op("gg_scope::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 2)
    double.register_fake(torch.empty_like)
"""
LEMMA = 'gg.lemma("gg_scope::double", lambda x: x * 2)'
DOUBLES = "def doubles():\n    return gg.verify(seq, double, **OPTIONS)\n"


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_lemmas_do_not_leak_from_file_to_file(folder, capfd, jobs):
    write("ops.py", OPERATOR)
    write("rules.py", f"import ops\n{LEMMA}")
    write("a.py", "from ops import double", DOUBLES, "gg.check(doubles)")
    write("b.py", "from ops import double\nimport rules", DOUBLES, "gg.check(doubles)")
    write("c.py", "from ops import double\nimport rules", DOUBLES, "gg.check(doubles)")
    expected = {"a.py::doubles": "unproven", "b.py::doubles": "verified", "c.py::doubles": "verified"}
    for files in (("a.py", "b.py", "c.py"), ("c.py", "b.py", "a.py")):
        assert verify(capfd, *files, "-j", jobs)[:2] == (3, expected)


def test_lemmas_do_not_leak_from_check_to_check(folder, capfd):
    inside = f"def first():\n    {LEMMA}\n    return doubles()\n"
    file = write("a.py", OPERATOR, DOUBLES, inside, "gg.check(first); gg.check(doubles)")
    assert verify(capfd, file)[:2] == (3, {"a.py::first": "verified", "a.py::doubles": "unproven"})


# ---------------------------------------------------------------------- pytest
TESTS = """
    import pytest

    @pytest.fixture
    def program():
        return seq

    @gg.check
    def test_good(program):
        return gg.verify(seq, program, **OPTIONS)

    @gg.check(expect="refuted")
    def test_caught():
        return bad()

    @gg.check
    def test_bad():
        return bad()

    @gg.check(expect="refuted")
    def test_missed():
        return good()

    @gg.check
    def test_drops():
        bad()
        return good()

    @gg.check
    def test_returns_nothing():
        bad()

    @gg.check
    def test_skipped():
        pytest.skip("later")

    class TestClass:
        @gg.check
        def test_method(self):
            return bad()
"""


def pytest_of(*args):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA", *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)


def test_a_test_that_is_a_check_fails_unless_its_verdict_is_the_expected_one(folder):
    write("test_x.py", TESTS)
    write("test_ops.py", OPERATOR, LEMMA, DOUBLES.replace("def ", "@gg.check\ndef test_"))
    write("test_z.py", "from test_ops import double", DOUBLES.replace("def ", "@gg.check\ndef test_"))
    done = pytest_of("-p", "graphguard.pytest_plugin", "test_ops.py", "test_x.py", "test_z.py")
    lines = [line.split(" - ")[0].split() for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED"))]
    assert {name: outcome for outcome, name in lines} == {
        "test_ops.py::test_doubles": "PASSED", "test_z.py::test_doubles": "FAILED",  # the second has no lemma
        "test_x.py::test_good": "PASSED", "test_x.py::test_caught": "PASSED", "test_x.py::test_bad": "FAILED",
        "test_x.py::test_missed": "FAILED", "test_x.py::test_drops": "FAILED", "test_x.py::test_returns_nothing": "FAILED",
        "test_x.py::TestClass::test_method": "FAILED",
    }  # fmt: skip
    assert "the check test_bad is expected to be verified" in done.stdout and "1 skipped" in done.stdout


def test_without_the_plugin_pytest_is_told_that_a_check_is_no_test(folder):
    write("test_x.py", "@gg.check\ndef test_bad():\n    return bad()\n")
    done = pytest_of("test_x.py")
    assert done.returncode == 2 and "pytest runs the check test_bad without GraphGuard's plugin" in done.stdout
