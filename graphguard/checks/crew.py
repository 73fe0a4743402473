"""Who runs tasks: processes of this machine, any executor of `concurrent.futures`, or a Dask cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

from graphguard.checks.task import Answer, Task, execute
from graphguard.errors import UsageError

_MANY = 32  # tasks at a time, where an executor does not say how many it runs


class Crew(Protocol):
    @property
    def threads(self) -> int | None:
        """That a process may have; None where that is not for this machine to say."""

    def hands(self) -> int:
        """How many tasks it can have at a time."""

    def submit(self, task: Task) -> Future[Answer]: ...

    def trouble(self) -> str | None:
        """Why it cannot go on, if it cannot."""

    def forget(self, run: str) -> None:
        """The run is over."""


class _Executor:
    """Any executor. Each task has a process of its own beside it, so that threads do as well as processes."""

    def __init__(self, executor: Executor, threads: int | None = None):
        self.executor, self.threads = executor, threads

    def hands(self) -> int:
        count = getattr(self.executor, "_max_workers", None)
        return count if isinstance(count, int) else _MANY

    def submit(self, task: Task) -> Future[Answer]:
        return self.executor.submit(execute, task)

    def trouble(self) -> str | None:
        return None

    def forget(self, run: str) -> None:
        pass


@contextmanager
def local_crew(processes: int) -> Iterator[Crew]:
    """So many processes at a time: each has a thread here that waits for it."""
    executor = ThreadPoolExecutor(processes, "graphguard")
    try:
        yield _Executor(executor, max(1, (os.cpu_count() or 1) // processes))
    finally:
        executor.shutdown(wait=True, cancel_futures=True)  # the run is over, so nobody is waited for


@contextmanager
def crew_of(executor: Any, processes: int) -> Iterator[Crew]:
    """The crew of what a user calls an executor; without one, so many processes of this machine."""
    if executor is None:
        with local_crew(processes) as crew:
            yield crew
    elif isinstance(executor, str):
        if not executor.startswith("dask://") or not executor.removeprefix("dask://"):
            raise UsageError(f"there is no executor {executor!r}; write dask://HOST:PORT for the scheduler of a Dask cluster")
        from graphguard.checks.cluster import connected

        with connected(executor) as cluster:
            yield cluster
    elif type(executor).__module__.partition(".")[0] == "distributed":
        from graphguard.checks.cluster import Cluster

        yield Cluster(executor)
    elif isinstance(executor, Executor):
        yield _Executor(executor)
    else:
        raise UsageError(f"executor= is {type(executor).__name__}; give an Executor of concurrent.futures, or dask://HOST:PORT")
