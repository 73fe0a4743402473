"""Imports files and runs their checks; the outcomes come in the order of the files and of the checks in them.

Several files, or several processes: each file is imported in a process of its own, so that nothing that it registers, imports
or changes is seen by the next. One file alone is imported here.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import warnings
from collections.abc import Generator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn, Protocol

from graphguard.checks.check import Check, Outcome
from graphguard.checks.discovery import Target, examine, failed
from graphguard.errors import GraphGuardError, InternalError


class Watcher(Protocol):
    """Who is told how far the run is."""

    @property
    def shown(self) -> bool: ...
    def found(self, checks: int, /) -> None: ...
    def start(self, check: str, /) -> None: ...
    def phase(self, check: str, title: str, done: int, total: int, /) -> None: ...
    def done(self, check: str, /) -> None: ...


def run(targets: Sequence[Target], processes: int, watcher: Watcher, listing: bool) -> Generator[Outcome, None, None]:
    """With `listing`, the reports have the operations of both programs; else what these would need is let go of."""
    if processes > 1 or len(targets) > 1:
        yield from _Pool(targets, processes, watcher, listing).outcomes()
        return
    for target in targets:
        checks, errors = examine(target)
        watcher.found(len(checks) + len(errors))
        yield from errors
        for check in checks:
            watcher.start(str(check))
            outcome = _outcome(check, watcher, listing)
            watcher.done(str(check))
            yield outcome


def _outcome(check: Check, watcher: Watcher, listing: bool) -> Outcome:
    """Lets go of the descriptions of all tensors; the list of operations is made before, if it is wanted."""
    with _telling(check, watcher):
        outcome = check.outcome()
    if outcome.report is not None:
        if listing:
            _ = outcome.report.listing
        outcome.report.make_listing = None
    return outcome


def _telling(check: Check, watcher: Watcher) -> Any:
    """Phases are shown on terminals only. Torch is loaded for them, which any check needs."""
    if not watcher.shown:
        return nullcontext()
    from graphguard.pipeline import showing

    return showing(lambda title, done, total: watcher.phase(str(check), title, done, total))


# ---------------------------------------------------------------------- processes
@dataclass
class _File:
    """What is known of a file: nothing before a process has imported it."""

    target: Target
    begun: bool = False
    imported: bool = False
    fragile: bool = False  # a process that imported it died
    checks: list[Check] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)


class _Pool:
    """So many processes, each of which has one file; where a file has many checks, several have it."""

    def __init__(self, targets: Sequence[Target], processes: int, watcher: Watcher, listing: bool):
        self.files = [_File(target) for target in targets]
        self.own = {os.path.realpath(target.file) for target in targets}  # files that run their checks themselves
        self.known: set[tuple[str, str]] = set()
        self.watcher, self.listing, self.count = watcher, listing, processes
        self.threads = max(1, (os.cpu_count() or 1) // processes)
        self.workers: list[_Worker] = []

    def outcomes(self) -> Generator[Outcome, None, None]:
        _warm_up()
        try:
            for file in self.files:
                while not file.imported:
                    self._go_on()
                position = 0
                while position < len(file.checks):
                    while position not in file.outcomes:
                        self._go_on()
                    yield file.outcomes.pop(position)
                    position += 1
        finally:
            for worker in self.workers:
                worker.stop()

    def _go_on(self) -> None:
        """Hire for what can be begun, and listen to whom is busy."""
        for file in self.files:
            while len(self.workers) < self.count and self._needs_one_more(file):
                file.begun = True
                self.workers.append(_Worker(file, self))
        for pipe in wait([worker.pipe for worker in self.workers]):
            worker = next(worker for worker in self.workers if worker.pipe is pipe)
            try:
                message, *content = _Reader(BytesIO(worker.pipe.recv_bytes())).load()
            except (EOFError, OSError):
                self._bury(worker)
                continue
            except Exception as error:  # something in a report is of a class that only the user's modules have
                message, *content = "outcome", None, InternalError(f"the report of {worker.check.name} cannot be read: {error}")
            getattr(self, f"_{message}")(worker, *content)

    def _needs_one_more(self, file: _File) -> bool:
        """Whether there is something to do for a further process."""
        have = [worker for worker in self.workers if worker.file is file]
        idle = sum(worker.position is None for worker in have)  # those that still import it
        return not file.begun or (idle < len(file.waiting) and not (file.fragile and have))

    # What workers say
    def _examined(self, worker: _Worker, checks: list[Check], errors: list[Outcome]) -> None:
        if not worker.file.imported:
            self._list(worker.file, checks, errors)
        self._give(worker)

    def _phase(self, worker: _Worker, *phase: Any) -> None:
        self.watcher.phase(str(worker.check), *phase)

    def _outcome(self, worker: _Worker, report: Any, error: GraphGuardError | None) -> None:
        self._settle(worker, report, error)
        self._give(worker)

    def _list(self, file: _File, checks: list[Check], errors: list[Outcome]) -> None:
        """The entries of a file: what is wrong with it, then its checks. Those of other files that it imports are run once."""
        here = os.path.realpath(file.target.file)
        for check in checks:
            key = os.path.realpath(check.file), check.name
            if key[0] != here and (key[0] in self.own or key in self.known):
                continue
            self.known.add(key)
            file.waiting.append(len(errors) + len(file.checks))
            file.checks.append(check)
        file.checks[:0] = [each.check for each in errors]
        file.outcomes.update(enumerate(errors))
        file.imported = True
        self.watcher.found(len(file.checks))

    def _give(self, worker: _Worker) -> None:
        """The next check of the file, or leave."""
        file = worker.file
        if not file.waiting:
            worker.position = None
            self._dismiss(worker)
            return
        worker.position = file.waiting.pop(0)
        self.watcher.start(str(worker.check))
        with suppress(OSError):  # a worker that died is noticed when it is listened to
            worker.pipe.send((worker.check.file, worker.check.name))

    def _settle(self, worker: _Worker, report: Any, error: GraphGuardError | None) -> None:
        assert worker.position is not None
        worker.file.outcomes[worker.position] = Outcome(worker.check, report, error)
        self.watcher.done(str(worker.check))
        worker.position = None

    def _bury(self, worker: _Worker) -> None:
        """A process that died takes its check with it, or the file if it was importing; and nothing else."""
        why, file = worker.end(), worker.file
        if worker.position is not None:
            self._settle(worker, None, InternalError(f"the process that ran the check {worker.check.name} ended {why}"))
        else:
            error = InternalError(f"{file.target.file}: the process that imported the file ended {why}")
            if not file.imported:
                self._list(file, [], [failed(file.target.file, error)])
            file.fragile = True
            if not any(other.file is file for other in self.workers if other is not worker):  # else that one goes on
                file.outcomes.update((position, Outcome(file.checks[position], None, error)) for position in file.waiting)
                file.waiting.clear()
        self._dismiss(worker)

    def _dismiss(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        worker.stop()


class _Worker:
    """A fork of this process that imports one file and runs checks of it. It leads a session of its own, so that all of its
    ranks can be stopped with it."""

    def __init__(self, file: _File, pool: _Pool):
        self.file = file
        self.position: int | None = None  # of the check that it runs
        self.pipe, theirs = Pipe()
        self.status: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12+ on fork beside threads; ours run no code
            self.pid = os.fork()
        if self.pid == 0:
            for other in (self, *pool.workers):
                other.pipe.close()  # else they would not notice that the parent is gone
            _serve(theirs, file.target, pool.threads, pool.watcher.shown, pool.listing)
        theirs.close()

    @property
    def check(self) -> Check:
        assert self.position is not None
        return self.file.checks[self.position]

    def end(self) -> str:
        """Wait for it, and say how it ended."""
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return f"by signal {-self.status}" if self.status < 0 else f"with exit code {self.status}"

    def stop(self) -> None:
        if self.status is None:
            for kill in (os.killpg, os.kill):  # the group is there as soon as the worker has made it
                with suppress(ProcessLookupError, PermissionError):
                    kill(self.pid, signal.SIGKILL)
            self.end()
        self.pipe.close()


class _Reader(pickle.Unpickler):
    """Reads what a worker says, and imports nothing of the user's for it."""

    def find_class(self, module: str, name: str) -> Any:
        if module not in sys.modules and not module.startswith("graphguard."):
            raise pickle.UnpicklingError(f"it has a {name}, which only {module} knows")
        return super().find_class(module, name)


def _warm_up() -> None:
    """Load what every check needs, once for all processes. Where torch is missing, the files say so."""
    with suppress(ImportError):
        import graphguard.api  # noqa: F401


# ---------------------------------------------------------------------- inside of a worker
def _serve(pipe: Connection, target: Target, threads: int, shown: bool, listing: bool) -> NoReturn:
    """What a worker does until it is stopped. Its stdout is stderr: results go through the pipe."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        if "OMP_NUM_THREADS" not in os.environ and "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(threads)
        _work(pipe, target, _Speaker(pipe, shown), listing)
        code = 0
    finally:
        os._exit(code)


def _work(pipe: Connection, target: Target, speaker: _Speaker, listing: bool) -> None:
    try:
        checks, errors = examine(target)
    except Exception as error:
        checks, errors = [], [failed(target.file, _defect(error))]
    pipe.send(("examined", [check.to_send() for check in checks], [_sendable(each) for each in errors]))
    while True:
        try:
            wanted = pipe.recv()
        except EOFError:
            return
        report, failure = _served(checks, wanted, speaker, listing)
        try:
            pipe.send(("outcome", report, failure))
        except Exception as error:
            pipe.send(("outcome", None, InternalError(f"the report of {wanted[1]} cannot be sent: {error}; please report it")))


def _served(
    checks: Sequence[Check], wanted: tuple[str, str], speaker: _Speaker, listing: bool
) -> tuple[Any, GraphGuardError | None]:
    found = [check for check in checks if (check.file, check.name) == wanted]
    if not found:
        return None, InternalError(f"the file has no check {wanted[1]} when it is imported again; its checks must not change")
    try:
        outcome = _outcome(found[0], speaker, listing)
    except Exception as error:
        return None, _defect(error)
    return outcome.report, _sendable(outcome).error


def _sendable(outcome: Outcome) -> Outcome:
    """An error of a class of the user's own is unknown to the parent."""
    error = outcome.error
    if error is None or type(error).__module__.startswith("graphguard."):
        return outcome
    return replace(outcome, error=GraphGuardError(str(error)))


def _defect(error: Exception) -> InternalError:
    return InternalError(f"{type(error).__name__} in GraphGuard itself: {error}; please report it")


class _Speaker:
    """Tells the parent how far the check is."""

    def __init__(self, pipe: Connection, shown: bool):
        self.pipe, self.shown = pipe, shown

    def found(self, checks: int) -> None:
        pass

    def start(self, check: str) -> None:
        pass

    def phase(self, check: str, title: str, done: int, total: int) -> None:
        self.pipe.send(("phase", title, done, total))

    def done(self, check: str) -> None:
        pass
