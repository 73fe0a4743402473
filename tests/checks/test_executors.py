"""Checks that are run elsewhere: by any executor, and by a Dask cluster that loses a worker on the way."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from harness import command

import graphguard as gg
from graphguard.cache.kit import kit
from graphguard.checks import cluster, nursery, task
from graphguard.checks.check import exit_code
from graphguard.checks.discovery import Target
from graphguard.checks.worker import content_of

HEAD = """
import os, signal, sys, time
import graphguard as gg
from graphguard.report.report import Report

def good(*notes):
    return Report("verified", notes=list(notes))

def begun(name):
    with open(f"begun-{name}", "a") as file:
        file.write("x")
"""
SUITE = """
@gg.check(n=range(4))
def row(n):
    begun(n)
    time.sleep(0.1)
    return good(str(os.getpid()))

@gg.check(expect="refuted")
def bad():
    return Report("refuted")

@gg.check
def dies():
    os.kill(os.getpid(), signal.SIGKILL)

@gg.check
def raises():
    raise ValueError("no luck")
"""


def write(name, *parts):
    with open(name, "w") as file:
        file.write(HEAD + "".join(textwrap.dedent(part) for part in parts))
    return name


def said(outcomes):
    return {each.check.name: each.report.verdict if each.report else str(each.error) for each in outcomes}


def times_begun(name):
    return len(Path(f"begun-{name}").read_text())


class Inline(Executor):
    """Runs a task when it is submitted; says nothing of how many it can run."""

    def submit(self, function, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


EXECUTORS = {
    "none": lambda: None,
    "threads": lambda: ThreadPoolExecutor(2),
    "processes": lambda: ProcessPoolExecutor(2, multiprocessing.get_context("spawn")),
    "inline": Inline,
}


# ---------------------------------------------------------------------- any executor
@pytest.mark.parametrize("name", EXECUTORS)
def test_every_executor_gives_the_same_table(folder, name):
    write("a.py", SUITE)
    write("b.py", "@gg.check\ndef other():\n    return good('a' if 'a' in sys.modules else '')\n")
    executor = EXECUTORS[name]()
    outcomes = gg.verify_many(["a.py", "b.py"], executor=executor)
    found = said(outcomes)
    assert found.pop("raises").endswith("the check raises raised ValueError: no luck")
    assert found == {
        **{f"row[n={n}]": "verified" for n in range(4)}, "bad": "refuted",
        "dies": "the process that ran the check dies ended by signal 9", "other": "verified",
    }  # fmt: skip
    assert [str(each.check) for each in outcomes[:2]] == ["a.py::row[n=0]", "a.py::row[n=1]"]
    assert exit_code(outcomes) == 2 and [times_begun(n) for n in range(4)] == [1] * 4
    assert outcomes[-1].report.notes == [""]  # b.py does not have the modules of a.py
    assert str(os.getpid()) not in [each.report.notes[0] for each in outcomes[:4]]
    if executor is not None:
        assert executor.submit(len, "it is the user's, and not shut down").result() == 35
        executor.shutdown()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"executor": "slurm://x"},
            "there is no executor 'slurm://x'; write dask://HOST:PORT for the scheduler of a Dask cluster",
        ),
        ({"executor": "dask://"}, "there is no executor 'dask://'"),
        ({"executor": "dask://nowhere"}, "--executor dask://nowhere: write dask://HOST:PORT"),
        ({"executor": "dask://a:99999"}, "--executor dask://a:99999: write dask://HOST:PORT"),
        ({"executor": 3}, "executor= is int; give an Executor of concurrent.futures, or dask://HOST:PORT"),
        ({"executor": Inline(), "processes": 2}, "give executor= or processes=, not both"),
        ({"processes": 0}, "processes= is 0; write how many run checks, from 1 on"),
        ({"limits": {"nothing": 1}}, "there is no limit 'nothing'"),
    ],
)
def test_what_is_no_executor_is_one_sentence(folder, arguments, text):
    write("a.py", SUITE)
    with pytest.raises(gg.UsageError) as caught:
        gg.verify_many("a.py", **arguments)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("checks", "text"),
    [([], "was given no checks"), (3, "not int"), ([None], "not NoneType"), ("nowhere.py", "there is no file nowhere.py"),
     (len, "len is no check; mark it with @gg.check"), (lambda: 0, "lambda is no check")],
)  # fmt: skip
def test_what_is_no_check_is_one_sentence(folder, checks, text):
    with pytest.raises(gg.UsageError, match=text):
        gg.verify_many(checks)


def test_an_executor_that_is_shut_down_or_breaks_is_an_error_of_each_check(folder):
    write("a.py", SUITE)
    closed = ThreadPoolExecutor(1)
    closed.shutdown()
    (outcome,) = gg.verify_many("a.py", executor=closed)
    assert str(outcome.error).startswith("it was not run to its end: the executor says RuntimeError: cannot schedule")

    class Breaks(Inline):
        def submit(self, function, work, /):
            if work.wanted is not None and work.wanted[1] != "bad":
                function = lambda work: 1 / 0
            return super().submit(function, work)

    found = said(gg.verify_many("a.py", executor=Breaks()))
    assert found.pop("bad") == "refuted" and len(found) == 6
    assert set(found.values()) == {"it was not run to its end: the executor says ZeroDivisionError: division by zero"}


def test_limits_reach_the_workers(folder):
    body = (
        "@gg.check\ndef c():\n    from graphguard.verdict.limits import limits_of\n    return good(str(limits_of().engine))\n"
    )
    write("a.py", body)
    (stated,) = gg.verify_many("a.py", limits={"factors": 7})
    (free,) = gg.verify_many("a.py")
    assert "factors=7" in stated.report.notes[0] and "factors=7" not in free.report.notes[0]


def test_a_condition_is_a_failure_where_it_is_strict(folder):
    body = "from graphguard.engine.proof import Condition\n@gg.check\ndef c():\n    report = good()\n"
    write("a.py", body + "    report.conditions = (Condition('x != 0', None, ('out',)),)\n    return report\n")
    assert [exit_code(gg.verify_many("a.py", strict=strict)) for strict in (False, True)] == [0, 3]


# ---------------------------------------------------------------------- functions
SCRIPT = """
@gg.check(n=[1, 2])
def mine(n):
    return good(str(n))

@gg.check
def other():
    return good()

{guard}
    for outcome in gg.verify_many([mine], processes=1):
        print(outcome.check.name, outcome.report.verdict if outcome.report else outcome.error)
"""


@pytest.mark.parametrize("guard", ['if __name__ == "__main__":', "if True:"])
def test_a_script_runs_the_checks_that_it_holds(folder, guard):
    write("script.py", SCRIPT.format(guard=guard))
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=120)
    if "main" in guard:
        assert done.stdout.splitlines() == ["mine[n=1] verified", "mine[n=2] verified"], done.stderr
    else:
        assert done.stdout.startswith("import gg.verify_many is called while a file of checks is run; put it below if __name__")


# ---------------------------------------------------------------------- workers
def test_a_file_that_changes_during_the_run_is_an_error(folder):
    write("a.py", "@gg.check(n=[1, 2])\ndef c(n):\n    open('a.py', 'a').write('#')\n    os.kill(os.getpid(), 9)\n")
    first, second = gg.verify_many("a.py", processes=1)
    assert "ended by signal 9" in str(first.error)
    assert str(second.error) == "the file has no check c[n=2] when it is imported again; its checks must not change"


def test_another_kit_is_refused(folder):
    file = write("a.py", SUITE)
    pattern = task.Task("run", Target(file), content_of(file), os.getcwd(), (), kit(), {}, False, None, False, False)
    assert task.execute(replace(pattern, kit={**kit(), "torch": "0.1"})).refused.endswith("not 0.1; install the same there")
    assert "has another graphguard" in task.execute(replace(pattern, kit={**kit(), "graphguard": "?"})).refused
    gone = task.execute(replace(pattern, run="gone", folder="/nowhere"))
    assert b"the folder /nowhere cannot be entered" in gone.said
    task._workers.close("gone")


def test_a_worker_that_left_is_replaced_without_a_word(folder):
    """An idle worker leaves after a while, and a nursery may be killed; no check had begun."""
    write("a.py", "@gg.check(n=[1, 2])\ndef c(n):\n    return good()\n")

    class Kills(Inline):
        def submit(self, function, work, /):
            for member in task._workers.idle:
                member.worker.kill()
                member.worker.end()
            return super().submit(function, work)

    assert said(gg.verify_many("a.py", executor=Kills())) == {"c[n=1]": "verified", "c[n=2]": "verified"}
    nursery._nurseries[0].process.kill()
    nursery._nurseries[0].process.wait()
    assert said(gg.verify_many("a.py")) == {"c[n=1]": "verified", "c[n=2]": "verified"}


def test_nobody_is_left_when_a_run_ends(folder):
    write("a.py", "@gg.check\ndef c():\n    return good(str(os.getpid()))\n")
    (outcome,) = gg.verify_many("a.py")
    assert not task._workers.idle and not task._workers.busy
    assert not is_alive(int(outcome.report.notes[0]))


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_who_loses_its_owner_is_killed(folder):
    write("a.py", "@gg.check\ndef c():\n    begun('c')\n    open('pid', 'w').write(str(os.getpid()))\n    time.sleep(60)\n")
    code = "import graphguard as gg; gg.verify_many('a.py')"
    owner = subprocess.Popen([sys.executable, "-c", code])
    until(lambda: os.path.exists("pid") and Path("pid").read_text())
    owner.kill()
    owner.wait()
    until(lambda: not is_alive(int(Path("pid").read_text())))


def until(condition, seconds=40):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)


# ---------------------------------------------------------------------- Dask
@pytest.fixture(scope="module")
def dask_cluster():
    import dask
    from distributed import LocalCluster

    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1, "distributed.comm.timeouts.connect": "5s"}),
        LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=":0", silence_logs=50) as made,
    ):
        yield made


@pytest.fixture
def address(dask_cluster):
    return dask_cluster.scheduler_address.replace("tcp://", "dask://")


# A worker of the cluster is the parent of the process that the check's own process was forked from.
KILLS = """
def kill_worker():
    nursery = os.getppid()
    with open(f"/proc/{nursery}/stat") as file:
        os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
    time.sleep(60)

@gg.check(n=range(8))
def row(n):
    begun(n)
    time.sleep(0.3)
    if n == 2 and not os.path.exists("pid"):
        with open("pid", "w") as file:
            file.write(str(os.getpid()))
        kill_worker()
    return good()
"""


def test_a_worker_of_the_cluster_that_is_killed_loses_nothing(folder, capfd, address):
    write("a.py", KILLS)
    write("b.py", SUITE.replace("begun(n)", "begun(f'b{n}')"))
    code, out, err = command(capfd, "verify", "a.py", "b.py", "--executor", address, "--output-format", "json")
    found = {each["name"] + each["file"]: each for each in json.loads(out)["checks"]}
    assert code == 2 and len(found) == 8 + 7 and "Traceback" not in err
    for n in range(8):
        entry = found[f"row[n={n}]a.py"]
        assert entry["verdict"] == "verified"
        again = [note for note in entry["notes"] if note.startswith("it was begun before, on tcp://")]
        assert times_begun(n) == 1 + len(again) and (n != 2 or again)
    assert all(found[f"row[n={n}]b.py"]["verdict"] == "verified" for n in range(4))
    assert found["diesb.py"]["error"] == "the process that ran the check dies ended by signal 9"
    until(lambda: not is_alive(int(Path("pid").read_text())))  # what the lost worker had begun does not go on


def test_a_check_that_kills_every_worker_is_an_error_and_the_others_run(folder, address):
    write("a.py", KILLS.replace('n == 2 and not os.path.exists("pid")', "n == 2"))
    outcomes = gg.verify_many("a.py", executor=address)
    found = said(outcomes)
    assert found.pop("row[n=2]").startswith("it was not run to its end: the executor says KilledWorker: ")
    assert set(found.values()) == {"verified"} and len(found) == 7 and exit_code(outcomes) == 2


def test_a_client_is_an_executor(folder, dask_cluster):
    from distributed import Client

    write("a.py", SUITE)
    with Client(dask_cluster, set_as_default=False) as client:
        for executor in (client, client.get_executor()):
            assert said(gg.verify_many("a.py::row", executor=executor)) == {f"row[n={n}]": "verified" for n in range(4)}
        assert client.get_metadata(["graphguard"]) and not any(client.get_metadata(["graphguard"]).values())


def test_a_scheduler_that_is_not_there_is_one_sentence(folder, capfd, monkeypatch):
    monkeypatch.setattr(cluster, "_GREETING", 1)
    write("a.py", SUITE)
    code, out, err = command(capfd, "verify", "a.py", "--executor", "dask://127.0.0.1:9")
    assert (code, out) == (2, "") and err == (
        "error: --executor dask://127.0.0.1:9: no scheduler answers there (OSError); start one\n"
    )
    code, _, err = command(capfd, "verify", "a.py", "--executor", "dask://127.0.0.1:9", "-j", "2")
    assert code == 2 and err.startswith("error: give -j or --executor, not both")


def test_a_cluster_without_workers_is_one_sentence_and_one_that_loses_them_ends(folder, monkeypatch):
    from distributed import LocalCluster

    write("a.py", "@gg.check(n=[1, 2, 3])\ndef c(n):\n    begun(n)\n    time.sleep(60)\n")
    monkeypatch.setattr(cluster, "_GREETING", 2)
    monkeypatch.setattr(cluster, "_PATIENCE", 1)
    monkeypatch.setattr("graphguard.checks.runner._TICK", 0.5)
    with LocalCluster(n_workers=0, dashboard_address=":0", silence_logs=50) as empty:
        address = empty.scheduler_address.replace("tcp://", "dask://")
        with pytest.raises(gg.UsageError, match="the cluster has no workers"):
            gg.verify_many("a.py", executor=address)
        empty.scale(1)
        empty.wait_for_workers(1)
        with ThreadPoolExecutor(1) as beside:
            done = beside.submit(gg.verify_many, "a.py", executor=address)
            until(lambda: os.path.exists("begun-1"))
            empty.scale(0)
            outcomes = done.result(60)
    lost = "it was not run to its end: the cluster has had no worker for "
    assert len(outcomes) == 3 and all(str(each.error).startswith(lost) for each in outcomes)


def test_dask_is_needed_for_dask_alone(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    write("a.py", SUITE)
    with pytest.raises(gg.UsageError, match=r"needs Dask; install it with `pip install graphguard\[dask\]`"):
        gg.verify_many("a.py", executor="dask://127.0.0.1:8786")
    assert len(gg.verify_many("a.py::row")) == 4
    code = (
        "import sys, graphguard.cli, graphguard.checks.many; print(sorted({'torch', 'distributed', 'dask'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
