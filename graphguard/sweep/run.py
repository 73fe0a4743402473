"""`graphguard sweep`: every configuration in a process of its own, with a limit of time; a row for each, whatever happens."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module, metadata
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from graphguard import __version__
from graphguard.errors import UsageError
from graphguard.report.report import Report
from graphguard.sweep.candidate import Candidate, Library
from graphguard.sweep.ledger import Ledger, Row, today
from graphguard.sweep.page import page, table

_MODULES = {
    "transformers": ("families", "transformers"),
    "megatron": ("megatron", "megatron-core"),
    "torchtitan": ("torchtitan", "torchtitan"),
    "deepspeed": ("deepspeed", "deepspeed"),
    "accelerate": ("accelerate", "accelerate"),
    "dtensor": ("dtensor", "torch"),
}
LIBRARIES = tuple(_MODULES)
_MOST_WORDS = 300  # of what was raised
Said = tuple[str, str, str]  # verdict, reason, where


def main(name: str, sizes: tuple[int, ...], options: bool, only: str, write: Path | None, seconds: float) -> int:
    """Run what has no row yet, and print the table. The exit code is that of `graphguard verify`, with rows for checks."""
    library = _library(name)
    ledger = Ledger(write)
    rows = [_row(ledger, library, each, seconds) for each in library.candidates(sizes, options) if only in each.name]
    if not rows:
        raise UsageError(f"no configuration of {library.version} has {only!r} in its name")
    print(table(rows), end="")
    if write is not None:
        write.with_suffix(".md").write_text(page(rows), encoding="utf-8")
    verdicts = {row.verdict for row in rows}
    return next(
        (code for verdict, code in (("error", 2), ("raises", 2), ("refuted", 1), ("unproven", 3)) if verdict in verdicts), 0
    )


def _library(name: str) -> Library:
    module, package = _MODULES[name]
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        raise UsageError(f"{package} is not installed") from None
    return Library(package, import_module(f"graphguard.sweep.{module}").candidates)


def _row(ledger: Ledger, library: Library, candidate: Candidate, seconds: float) -> Row:
    versions = library.version, metadata.version("torch"), __version__
    kept = ledger.rows.get((*versions, candidate.name, candidate.ranks))
    if kept is not None:
        return kept
    if sys.stderr.isatty():
        print(f"{candidate.name}, {candidate.ranks}", file=sys.stderr)
    started = time.monotonic()
    verdict, reason, where = apart(lambda: said(candidate.verify), seconds)
    spent = round(time.monotonic() - started, 1)
    row = Row(*versions, candidate.name, candidate.ranks, verdict, reason, where, spent, today())
    ledger.add(row)
    return row


def said(verify: Callable[[], Report]) -> Said:
    """Verdict, reason and place. What is raised is an error of this configuration, whatever it is; where a rank raises and the
    sequential program has run, it is one of the library."""
    try:
        report = verify()
    except Exception as error:
        words = " ".join(str(error).split()) or type(error).__name__
        return "raises" if re.match(r"rank \d+ raised ", words) else "error", words[:_MOST_WORDS], ""
    if not report.findings:
        return report.verdict, "", ""
    finding = report.findings[0]
    lines = [str(line) for line in finding.lines]
    return report.verdict, finding.message, lines[0] if lines else ""


# ---------------------------------------------------------------------- processes
def apart(work: Callable[[], Said], seconds: float) -> Said:
    """What `work` says in a process of its own, which is ended with all that it started when its time is over."""
    context = get_context("fork")  # configurations cannot be sent, so they are inherited
    ours, theirs = context.Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads in the process that is forked
        child = context.Process(target=_child, args=(work, theirs))
        child.start()
    theirs.close()
    answer: Said = ("error", f"no answer within {seconds:g} seconds", "")
    try:
        if ours.poll(seconds):
            answer = ours.recv()
    except EOFError:
        child.join()
        answer = ("error", f"the process ended with exit code {child.exitcode}", "")
    finally:
        _end(child.pid)
        child.join()
    return answer


def _child(work: Callable[[], Said], answer: Connection) -> None:
    os.setsid()  # a group of its own, so that its ranks end with it
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    answer.send(work())


def _end(pid: int | None) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(pid, signal.SIGKILL)


def sizes_of(text: str) -> tuple[int, ...]:
    """The numbers of ranks that `--tp 2,4` names."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 2:
        raise UsageError(f"--tp {text!r} is no list of numbers of ranks from 2 on, such as 2,4")
    return sizes
