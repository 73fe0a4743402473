"""`gg.verify_many`: what `graphguard verify` does, in Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from graphguard.checks.check import Outcome, path_of
from graphguard.checks.crew import crew_of
from graphguard.checks.discovery import select
from graphguard.checks.runner import Unwatched, run
from graphguard.checks.worker import is_worker
from graphguard.errors import UsageError
from graphguard.verdict.limits import limits_of, stated

Checks = str | os.PathLike[str] | Callable[..., Any]


def verify_many(
    checks: Checks | Iterable[Checks],
    *,
    executor: Executor | str | None = None,
    processes: int | None = None,
    strict: bool = False,
    limits: Mapping[str, int] | None = None,
    cache: bool = True,
) -> list[Outcome]:
    """Run checks, each file of them in a process of its own, and return their outcomes in order: `outcome.check`, and
    `outcome.report` or `outcome.error`.

    checks: what `graphguard verify` takes: files, folders, `file.py::name`; or functions that are marked `@gg.check`, which are
        found by their file and name.
    executor: any `concurrent.futures.Executor`, a Dask client, or `"dask://HOST:PORT"`; left out, processes of this machine.
    processes: how many of these at a time; left out, as many as there are cores.
    strict: whether a verdict that has conditions, or is along paths, is a failure.
    limits: of work, whatever the checks say.
    cache: whether results are kept, and those of earlier runs taken where nothing has changed.

    The files are imported by other processes, so a script that calls this does so below `if __name__ == "__main__":`.
    """
    if is_worker():
        raise UsageError('gg.verify_many is called while a file of checks is run; put it below if __name__ == "__main__":')
    if executor is not None and processes is not None:
        raise UsageError("give executor= or processes=, not both")
    if processes is not None and (not isinstance(processes, int) or isinstance(processes, bool) or processes < 1):
        raise UsageError(f"processes= is {processes!r}; write how many run checks, from 1 on")
    limits_of(limits)
    selection = select(_paths(checks))
    with stated(limits or {}), crew_of(executor, processes or os.cpu_count() or 1) as crew:
        done = list(run(selection.targets, 1, Unwatched(), False, crew, cache))
    return [replace(each, strict=strict) for each in [*done, *selection.bare(done)]]


def _paths(checks: Any) -> list[str]:
    if isinstance(checks, str | os.PathLike) or callable(checks):
        checks = [checks]
    if not isinstance(checks, Iterable):
        raise UsageError(f"gg.verify_many takes paths and checks, not {type(checks).__name__}")
    paths = [_path(each) for each in checks]
    if not paths:
        raise UsageError("gg.verify_many was given no checks; give files, folders, or functions that are marked")
    return paths


def _path(each: Any) -> str:
    if isinstance(each, str | os.PathLike):
        return os.fsdecode(each)
    if not callable(each):
        raise UsageError(f"gg.verify_many takes paths and checks, not {type(each).__name__}")
    return path_of(each)
