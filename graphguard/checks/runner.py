"""Imports files and runs their checks; the outcomes come in the order of the files and of the checks in them.

Several files, or an executor: each file is imported in a process of its own, so that nothing that it registers, imports or
changes is seen by the next. One file alone is imported here.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import uuid
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any, Protocol

from graphguard.cache.kit import kit
from graphguard.capture.front import are_ranks_apart
from graphguard.checks.check import Check, Outcome
from graphguard.checks.crew import Crew, local_crew
from graphguard.checks.discovery import Target, examine, failed
from graphguard.checks.task import Answer, Task, listening, own_path
from graphguard.checks.worker import content_of, run_check
from graphguard.errors import GraphGuardError, InternalError, UsageError, first_line
from graphguard.verdict.limits import stated_now

_TICK = 5.0  # seconds after which a crew is asked whether it can go on
_CANCELLED = "it was not run to its end: the executor has cancelled it"
_READABLE = ("graphguard", "torch", "numpy")  # packages whose classes a report may have


class Watcher(Protocol):
    """Who is told how far the run is."""

    @property
    def shown(self) -> bool: ...
    def found(self, checks: int, /) -> None: ...
    def start(self, check: str, /) -> None: ...
    def phase(self, check: str, title: str, done: int, total: int, /) -> None: ...
    def done(self, check: str, /) -> None: ...


class Unwatched:
    """Who does not want to know."""

    shown = False

    def found(self, checks: int) -> None: ...
    def start(self, check: str) -> None: ...
    def phase(self, check: str, title: str, done: int, total: int) -> None: ...
    def done(self, check: str) -> None: ...


def run(
    targets: Sequence[Target],
    processes: int,
    watcher: Watcher,
    listing: bool,
    crew: Crew | None = None,
    keeps: bool = False,
) -> Generator[Outcome, None, None]:
    """With `listing`, the reports have the operations of both programs; else what these would need is let go of.

    crew: who runs the checks, in place of so many processes of this machine.
    keeps: whether results are kept, and taken from earlier runs."""
    if crew is not None:
        yield from _Run(targets, crew, watcher, listing, keeps).outcomes()
    elif processes > 1 or len(targets) > 1:
        with local_crew(processes) as own:
            yield from _Run(targets, own, watcher, listing, keeps).outcomes()
    else:
        for target in targets:
            yield from _here(target, watcher, listing, keeps)


def _here(target: Target, watcher: Watcher, listing: bool, keeps: bool) -> Generator[Outcome, None, None]:
    checks, errors = examine(target)
    watcher.found(len(checks) + len(errors))
    yield from errors
    for check in checks:
        watcher.start(str(check))
        outcome = run_check(check, watcher, listing, keeps)
        watcher.done(str(check))
        yield outcome


# ---------------------------------------------------------------------- elsewhere
@dataclass(eq=False)
class _File:
    """What is known of a file: nothing before a worker has imported it."""

    target: Target
    content: str
    begun: bool = False
    imported: bool = False
    fragile: bool = False  # a process that imported it died
    running: int = 0
    checks: list[Check] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    @property
    def has_work(self) -> bool:
        """Whether there is something to do for one more."""
        return not self.begun or (bool(self.waiting) and not (self.fragile and self.running))


@dataclass(frozen=True)
class _Errand:
    """A task that was given away. position: of the check in its file; None where the file is to be listed."""

    file: _File
    position: int | None

    @property
    def check(self) -> Check:
        assert self.position is not None
        return self.file.checks[self.position]


class _Run:
    """Gives the crew as many tasks as it has hands, and puts what comes back in order. All is told to the watcher here, in the
    thread of the driver, whoever says it."""

    def __init__(self, targets: Sequence[Target], crew: Crew, watcher: Watcher, listing: bool, keeps: bool):
        self.files = [_File(target, content_of(target.file)) for target in targets]
        self.own = {os.path.realpath(target.file) for target in targets}  # files that run their checks themselves
        self.known: set[tuple[str, str]] = set()
        self.crew, self.watcher = crew, watcher
        self.errands: dict[Future[Answer], _Errand] = {}
        self.events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.lost: str | None = None  # why the crew cannot go on
        elsewhere = _folder(), own_path(), kit(), stated_now(), are_ranks_apart()
        self.pattern = Task(uuid.uuid4().hex, Target(""), "", *elsewhere, crew.threads, listing, keeps)

    def outcomes(self) -> Generator[Outcome, None, None]:
        listener = (lambda *event: self.events.put(event)) if self.watcher.shown else None
        with listening(self.pattern.run, listener):
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
                for future in self.errands:
                    future.cancel()
                self.crew.forget(self.pattern.run)

    # What is given away
    def _go_on(self) -> None:
        """Give away what can be begun, and listen to what is said."""
        hands = max(1, self.crew.hands())
        for file in self.files:
            while file.has_work and len(self.errands) < hands:
                self._give(file)
        try:
            event, *content = self.events.get(timeout=_TICK)
        except queue.Empty:
            self._look_after_the_crew()
            return
        if event == "done":
            self._take_back(*content)
        else:
            getattr(self.watcher, event)(*content)

    def _give(self, file: _File) -> None:
        position = file.waiting.pop(0) if file.begun else None
        file.begun, errand = True, _Errand(file, position)
        wanted = None if position is None else (errand.check.file, errand.check.name)
        future: Future[Answer] = Future()
        try:
            if self.lost is None:
                future = self.crew.submit(replace(self.pattern, target=file.target, content=file.content, wanted=wanted))
            else:
                future.set_exception(InternalError(self.lost))
        except Exception as error:  # of a library: the executor was shut down, or is broken
            future.set_exception(error)
        self.errands[future] = errand
        file.running += 1
        future.add_done_callback(lambda done: self.events.put(("done", done)))

    def _look_after_the_crew(self) -> None:
        trouble = self.crew.trouble()
        if trouble is None:
            return
        self.lost = f"it was not run to its end: {trouble}"
        for future in list(self.errands):
            future.cancel()
            self._take_back(future)

    # What comes back
    def _take_back(self, future: Future[Answer]) -> None:
        errand = self.errands.pop(future, None)
        if errand is None:  # it was given up before
            return
        errand.file.running -= 1
        answer = _answer(future) if future.done() and not future.cancelled() else InternalError(self.lost or _CANCELLED)
        if isinstance(answer, GraphGuardError):
            self._fail(errand, answer)
        elif answer.ended is not None:
            self._bury(errand, answer)
        elif errand.position is None:
            self._list(errand.file, *_read(answer.said, errand.file.target.file))
        else:
            self._settle(errand, *_read_outcome(answer, errand.check))

    def _fail(self, errand: _Errand, error: GraphGuardError) -> None:
        if errand.position is None:
            self._list(errand.file, [], [failed(errand.file.target.file, error)])
        else:
            self._settle(errand, None, error)

    def _bury(self, errand: _Errand, answer: Answer) -> None:
        """A process that died takes its check with it, or the file if it was importing; and nothing else."""
        file = errand.file
        if answer.imported and errand.position is not None:
            text = f"the process that ran the check {errand.check.name} ended {answer.ended}{_again(answer)}"
            self._settle(errand, None, InternalError(text))
        elif errand.position is not None and (not file.fragile or file.running):  # alone, it may be imported once more
            file.fragile = True
            file.waiting.insert(0, errand.position)
        else:
            self._fail(errand, InternalError(f"{file.target.file}: the process that imported the file ended {answer.ended}"))

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

    def _settle(self, errand: _Errand, report: Any, error: GraphGuardError | None) -> None:
        assert errand.position is not None
        errand.file.outcomes[errand.position] = Outcome(errand.check, report, error)
        self.watcher.done(str(errand.check))


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        raise UsageError("the working folder is gone; go to one that is there") from None


def _again(answer: Answer) -> str:
    """For whom reads the result: what ran twice is not hidden."""
    return f"; it was begun before, on {', '.join(answer.earlier)}, which was lost" if answer.earlier else ""


# ---------------------------------------------------------------------- reading
def _answer(future: Future[Answer]) -> Answer | GraphGuardError:
    """The answer, or why there is none."""
    try:
        answer = future.result()
    except GraphGuardError as error:
        return error
    except Exception as error:
        return InternalError(f"it was not run to its end: the executor says {type(error).__name__}: {first_line(error)}")
    return answer if answer.refused is None else UsageError(answer.refused)


def _read_outcome(answer: Answer, check: Check) -> tuple[Any, GraphGuardError | None]:
    try:
        report, error = _Reader(BytesIO(answer.said)).load()
    except Exception as error:  # something in a report is of a class that only the user's modules have
        return None, InternalError(f"the report of {check.name} cannot be read: {error}")
    if answer.earlier and report is not None:
        report.notes.append(_again(answer).removeprefix("; "))
    return report, error


def _read(said: bytes, file: str) -> tuple[list[Check], list[Outcome]]:
    try:
        checks, errors = _Reader(BytesIO(said)).load()
    except Exception as error:
        return [], [failed(file, InternalError(f"the checks of {file} cannot be read: {error}"))]
    return checks, errors


class _Reader(pickle.Unpickler):
    """Reads what a worker says, and imports nothing of the user's for it."""

    def find_class(self, module: str, name: str) -> Any:
        if module not in sys.modules and module.partition(".")[0] not in _READABLE:
            raise pickle.UnpicklingError(f"it has a {name}, which only {module} knows")
        return super().find_class(module, name)
