"""What an executor is given: to import a file, or to run one of its checks, in a process that this file has for itself.

An executor may run tasks in threads of this process, in processes of its own, or on another machine. Wherever it is, a worker
is asked there, and is kept for the next check of its file.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from graphguard.cache.kit import differences
from graphguard.checks.discovery import Target
from graphguard.checks.nursery import Worker, new_worker
from graphguard.checks.worker import Setting

Listener = Callable[..., None]  # told `start` and `phase`, with the check


@dataclass(frozen=True)
class Task:
    """run: a word that no other run has. apart: whether every rank is captured by itself. keeps: whether results are kept, and
    taken from earlier runs. wanted: the file and the name of a check; None to say what checks there are."""

    run: str
    target: Target
    content: str
    folder: str
    path: tuple[str, ...]
    kit: dict[str, str]
    limits: dict[str, int]
    apart: bool
    threads: int | None
    listing: bool
    keeps: bool
    wanted: tuple[str, str] | None = None

    @property
    def title(self) -> str:
        return self.target.file if self.wanted is None else "::".join(self.wanted)


@dataclass(frozen=True)
class Answer:
    """What came of a task. said: what the worker said, pickled, for whom knows how to read it. ended: how its process ended, if
    it did. imported: whether the file was imported by then. refused: why the task could not be begun. earlier: who began it
    before, and was lost."""

    said: bytes = b""
    ended: str | None = None
    imported: bool = False
    refused: str | None = None
    earlier: tuple[str, ...] = ()


def own_path() -> tuple[str, ...]:
    """Where this process finds modules beside its installation: a worker elsewhere has an installation of its own."""
    installed = tuple(os.path.join(os.path.realpath(place), "") for place in {sys.prefix, sys.base_prefix})
    return tuple(
        entry
        for entry in sys.path
        if isinstance(entry, str) and not os.path.join(os.path.realpath(entry or os.curdir), "").startswith(installed)
    )


def execute(task: Task) -> Answer:
    """Called by the executor, wherever it is."""
    other = differences(task.kit)
    if other:
        return Answer(refused=f"{os.uname().nodename} has {other}; install the same there")
    while True:
        member = _workers.take(task)
        try:
            answer = member.answer(task, _listeners.get(task.run))
        finally:
            _workers.give_back(member)
        if answer is not None:
            return answer


# ---------------------------------------------------------------------- workers
@dataclass(eq=False)
class _Member:
    """A worker, with what is known of it."""

    task: Task  # for which it was begun
    worker: Worker
    listing: bytes | None = None  # what it said of its file, once it has imported it
    has_ended: bool = False

    def answer(self, task: Task, listener: Listener | None) -> Answer | None:
        """None if it has left without having begun, because nobody had asked it for long: another one is to be asked."""
        was_idle, begun, title = self.listing is not None, False, task.title
        try:
            if self.listing is None:
                self.worker.pipe.send(_setting(task, listener))
                self.listing = self._heard(b"examined", None, title)
            if task.wanted is None:
                return Answer(self.listing, imported=True)
            self.worker.pipe.send(task.wanted)
            self._heard(b"begun", None, title)
            begun = True
            if listener is not None:
                listener("start", title)
            return Answer(self._heard(b"outcome", listener, title), imported=True)
        except (EOFError, OSError):
            self.has_ended = True
            return Answer(ended=self.worker.end(), imported=self.listing is not None) if begun or not was_idle else None

    def _heard(self, word: bytes, listener: Listener | None, title: str) -> bytes:
        """What the worker says with this word. A process that dies may leave others that hold its pipe, so the line counts."""
        pipe, line = self.worker.pipe, self.worker.line
        while True:
            if pipe not in wait([pipe, line]):
                raise EOFError
            said, _, content = pipe.recv_bytes().partition(b"\n")
            if said == word:
                return content
            if said == b"phase" and listener is not None:
                listener("phase", title, *pickle.loads(content))


def _setting(task: Task, listener: Listener | None) -> Setting:
    own = [entry for entry in sys.path if isinstance(entry, str)]
    path = (*(entry for entry in task.path if entry not in own), *own)
    environment, shown = dict(os.environ), listener is not None
    more = task.limits, task.apart, task.threads, shown, task.listing, task.keeps
    return Setting(task.target, task.content, task.folder, path, environment, *more)


@dataclass
class _Workers:
    """Of this process, whoever they serve. Those that are idle are kept as long as there are not more than were ever busy."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    idle: list[_Member] = field(default_factory=list)
    busy: list[_Member] = field(default_factory=list)
    most: int = 1
    over: set[str] = field(default_factory=set)  # runs that are

    def take(self, task: Task) -> _Member:
        """One that has the file, or else a new one."""
        with self.lock:
            member = next((each for each in self.idle if _same_file(each.task, task)), None)
            if member is not None:
                self.idle.remove(member)
                self.busy.append(member)
        if member is None:
            member = _Member(task, new_worker())
            with self.lock:
                self.busy.append(member)
        with self.lock:
            self.most = max(self.most, len(self.busy))
            if task.run in self.over:
                member.worker.kill()
        return member

    def give_back(self, member: _Member) -> None:
        with self.lock:
            self.busy.remove(member)
            if member.has_ended or member.task.run in self.over:
                surplus = [member]
            else:
                self.idle.append(member)
                surplus = self.idle[: -self.most]
                self.idle = self.idle[-self.most :]
        for each in surplus:
            each.worker.stop()

    def close(self, run: str) -> None:
        """The run is over: nobody will ask its workers again, and who waits for one need not."""
        with self.lock:
            self.over.add(run)
            for each in self.busy:
                if each.task.run == run:
                    each.worker.kill()
            surplus = [each for each in self.idle if each.task.run == run]
            self.idle = [each for each in self.idle if each.task.run != run]
        for each in surplus:
            each.worker.stop()


def _same_file(one: Task, other: Task) -> bool:
    return (one.run, one.target, one.listing) == (other.run, other.target, other.listing)


_workers = _Workers()
_listeners: dict[str, Listener] = {}  # by run: who is told, if the driver is in this process


@contextmanager
def listening(run: str, listener: Listener | None) -> Iterator[None]:
    """While a run goes on: what its tasks in this process say is heard, and at the end their workers are stopped."""
    if listener is not None:
        _listeners[run] = listener
    try:
        yield
    finally:
        _listeners.pop(run, None)
        _workers.close(run)
