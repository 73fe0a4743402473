"""Runs checks one after the other, or in processes of their own; the outcomes come in the order of the checks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Protocol

from graphguard.checks import Check, Outcome, find_checks
from graphguard.errors import GraphGuardError, InternalError


class Watcher(Protocol):
    """Who is told how far the run is."""

    @property
    def shown(self) -> bool: ...
    def start(self, check: str, /) -> None: ...
    def phase(self, check: str, title: str, done: int, total: int, /) -> None: ...
    def done(self, check: str, /) -> None: ...


def run(checks: Sequence[Check], processes: int, watcher: Watcher, listing: bool) -> Generator[Outcome, None, None]:
    """With `listing`, the reports have the operations of both programs; else what these would need is let go of."""
    if processes > 1 and len(checks) > 1:
        yield from _Pool(checks, min(processes, len(checks)), watcher, listing).outcomes()
        return
    for check in checks:
        watcher.start(str(check))
        with _telling(check, watcher):
            outcome = check.outcome()
        settle(outcome, listing)
        watcher.done(str(check))
        yield outcome


def settle(outcome: Outcome, listing: bool) -> None:
    """Let go of the descriptions of all tensors; the list of operations is made before, if it is wanted."""
    if outcome.report is not None:
        if listing:
            _ = outcome.report.listing
        outcome.report.make_listing = None


def _telling(check: Check, watcher: Watcher) -> Any:
    """Phases are shown on terminals only. Torch is loaded for them, which any check needs."""
    if not watcher.shown:
        return nullcontext()
    from graphguard.api import showing

    return showing(lambda title, done, total: watcher.phase(str(check), title, done, total))


# ---------------------------------------------------------------------- processes
class _Worker:
    """A process that runs checks. It leads a session of its own, so that all of its ranks can be stopped with it."""

    def __init__(self, threads: int):
        self.pipe, theirs = Pipe()
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        code = "from graphguard.runner import serve; serve()"
        arguments = [sys.executable, "-P", "-c", code, str(theirs.fileno())]
        self.process = subprocess.Popen(
            arguments, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True, env=environment
        )
        theirs.close()
        self.position: int | None = None
        self.pipe.send((sys.path, os.getcwd()))

    def stop(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.pipe.close()


class _Pool:
    def __init__(self, checks: Sequence[Check], processes: int, watcher: Watcher, listing: bool):
        self.checks, self.watcher, self.listing = checks, watcher, listing
        self.waiting = list(range(len(checks)))
        self.found: dict[int, Outcome] = {}
        self.threads = max(1, (os.cpu_count() or 1) // processes)
        self.count = processes
        self.workers: list[_Worker] = []

    def outcomes(self) -> Generator[Outcome, None, None]:
        try:
            for _ in range(self.count):
                self._give(self._hire())
            for position in range(len(self.checks)):
                while position not in self.found:
                    self._listen()
                yield self.found.pop(position)
        finally:
            for worker in self.workers:
                worker.stop()

    def _hire(self) -> _Worker:
        worker = _Worker(self.threads)
        self.workers.append(worker)
        return worker

    def _give(self, worker: _Worker) -> None:
        """The next check, if there is one."""
        if not self.waiting:
            worker.position = None
            return
        worker.position = self.waiting.pop(0)
        check = self.checks[worker.position]
        self.watcher.start(str(check))
        with suppress(OSError):  # a worker that died is noticed when it is listened to
            worker.pipe.send((check.file, check.name, self.watcher.shown, self.listing))

    def _listen(self) -> None:
        busy = {worker.pipe: worker for worker in self.workers if worker.position is not None}
        for pipe in wait(list(busy)):
            worker = busy[pipe]  # type: ignore[index]
            assert worker.position is not None
            check = self.checks[worker.position]
            try:
                message = worker.pipe.recv()
            except (EOFError, OSError):
                self._bury(worker, check)
                continue
            if message[0] == "phase":
                self.watcher.phase(str(check), *message[1:])
            else:
                self._settle(worker, Outcome(check, *message[1:]))
                self._give(worker)

    def _settle(self, worker: _Worker, outcome: Outcome) -> None:
        assert worker.position is not None
        self.found[worker.position] = outcome
        self.watcher.done(str(outcome.check))

    def _bury(self, worker: _Worker, check: Check) -> None:
        """A process that died takes its check with it, and nothing else."""
        code = worker.process.wait()
        why = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        self._settle(worker, Outcome(check, None, InternalError(f"the process that ran the check {check.name} ended {why}")))
        self.workers.remove(worker)
        worker.stop()
        if self.waiting:
            self._give(self._hire())


def serve() -> None:
    """What a worker does. Its stdout is stderr: results go through the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(int(sys.argv[1]))
    os.set_inheritable(pipe.fileno(), False)
    os.dup2(2, 1)
    sys.path[:], folder = pipe.recv()
    os.chdir(folder)
    while True:
        try:
            file, name, shown, listing = pipe.recv()
        except EOFError:
            return
        report, failure = _served(_Speaker(pipe, shown), file, name, listing)
        try:
            pipe.send(("outcome", report, failure))
        except Exception as error:
            pipe.send(("outcome", None, InternalError(f"the report of {name} cannot be sent: {error}; please report it")))


def _served(speaker: _Speaker, file: str, name: str, listing: bool) -> tuple[Any, GraphGuardError | None]:
    try:
        (check,) = find_checks(f"{file}::{name}")
        (outcome,) = run([check], 1, speaker, listing)
    except GraphGuardError as error:
        return None, error
    except Exception as error:
        return None, InternalError(f"{type(error).__name__} in GraphGuard itself: {error}; please report it")
    return outcome.report, outcome.error


class _Speaker:
    """Tells the parent how far the check is."""

    def __init__(self, pipe: Connection, shown: bool):
        self.pipe, self.shown = pipe, shown

    def start(self, check: str) -> None:
        pass

    def phase(self, check: str, title: str, done: int, total: int) -> None:
        self.pipe.send(("phase", title, done, total))

    def done(self, check: str) -> None:
        pass
