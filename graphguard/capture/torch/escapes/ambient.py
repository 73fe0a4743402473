"""What each process of a real run has for itself: clocks, numbers of processes, generators that nobody seeded, the order of
sets. Forks of one process share it, so it is varied: every capture of a program has another. What a program asked for is
noted, so that a difference can be explained, and programs that asked for nothing need not be captured again."""

from __future__ import annotations

import builtins
import datetime
import functools
import os
import platform
import random
import socket
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import graphguard
from graphguard.capture.torch.escapes import set_order
from graphguard.capture.torch.escapes.set_order import follow_orders
from graphguard.graph.ir import Source

if TYPE_CHECKING:
    from graphguard.capture.torch.adapters.holders import Holders

_CLOCKS = (time.time, time.monotonic, time.perf_counter, time.process_time, time.thread_time)
_CLOCKS_NS = (time.time_ns, time.monotonic_ns, time.perf_counter_ns, time.process_time_ns, time.thread_time_ns)
_BROKEN_DOWN = (time.localtime, time.gmtime, time.ctime)
_PROCESS = (os.getpid, os.getppid, os.urandom, uuid.uuid1, uuid.uuid4)
_HOST = (socket.gethostname, socket.getfqdn, platform.node)
ORIGINALS: tuple[Any, ...] = (*_CLOCKS, *_CLOCKS_NS, *_BROKEN_DOWN, *_PROCESS, *_HOST, datetime.datetime, torch.seed)
_LATER = 98_765_432.1  # seconds; about three years
_STANDARD = (sysconfig.get_paths()["stdlib"] + os.sep, sysconfig.get_paths()["platstdlib"] + os.sep, "<", __file__,
             set_order.__file__)  # fmt: skip
_INSTALLED = "-packages" + os.sep  # below the second of them, in a virtual environment
_LIBRARIES = (os.path.dirname(graphguard.__file__) + os.sep, os.path.dirname(torch.__file__) + os.sep)
_python_state, _numpy_state = random.getstate, np.random.get_state  # replaced below
_python: Any = random.random.__self__  # type: ignore[attr-defined] # whose methods are the functions of the module
SETS, NUMPY, PYTHON = "the order of a set", "numpy's generator", "Python's generator"
UNVARIED = "sets have the same order in every process: this interpreter does not let it be varied"


class Ambient:
    """The state of one capture. `turn` counts the captures of one program; `rank` is None for the sequential one."""

    def __init__(self, rank: int | None, turn: int):
        self._seed = 2 * (0 if rank is None else rank + 1) + turn
        self._shift = _LATER * turn
        self._other = (turn + (rank or 0)) % 2 == 1
        self.asked: dict[str, Source | None] = {}  # for what, and where first in a file of the user's
        self.orders_vary = True

    def vary(self, holders: Holders) -> None:
        """Patches Python for the rest of this process."""
        self._vary_generators()
        self._vary_clocks(holders)
        for function in (*_PROCESS, torch.seed):
            holders.replace(function, self._noting(function, function.__name__))
        random._urandom = self._noting(os.urandom, "urandom")  # type: ignore[attr-defined]
        for function in _HOST:
            holders.replace(function, self._noting(function, "the name of the host", lambda name: f"{name}-{self._seed}"))
        self._note_addresses()
        self.orders_vary = follow_orders(self._other, lambda: self._note(SETS, 3))

    # ------------------------------------------------------------------ what is asked for
    def _note(self, what: str, depth: int) -> bool:
        """Note it, with the line if it is the user's own; False if it is a library that asks."""
        where = nearest_of_user(depth + 1)
        if self.asked.get(what) is None:
            self.asked[what] = where
        return where is not None

    def _noting(self, function: Callable[..., Any], what: str, change: Callable[[Any], Any] | None = None) -> Any:
        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            given = function(*args, **kwargs)
            return change(given) if self._note(what, 2) and change is not None else given

        return noted

    def finish(self) -> None:
        """Look at generators that may have been drawn from under any name."""
        for what, state in self._states.items():
            if state != _state(what):
                self.asked.setdefault(what, None)

    def lines(self) -> list[str]:
        """What is assumed of a program of which two captures agree."""
        said = [
            f"what the program asks for at {where} ({what}) differs from process to process, and is taken not to matter: two "
            "captures with different ones agree"
            for what, where in self.asked.items()
            if where is not None and what != SETS
        ]
        return said if self.orders_vary else [*said, UNVARIED]

    # ------------------------------------------------------------------ what is varied
    def _vary_generators(self) -> None:
        np.random.seed(self._seed)
        random.seed(self._seed)
        self._states = {NUMPY: _state(NUMPY), PYTHON: _state(PYTHON)}
        for module, owner, what in ((np.random, np.random.mtrand._rand, NUMPY), (random, _python, PYTHON)):
            for name, function in list(vars(module).items()):
                if getattr(function, "__self__", None) is owner and name not in ("seed", "set_state", "setstate"):
                    setattr(module, name, self._noting(function, what))
        seed = random.Random.seed

        def seeded(generator: random.Random, a: Any = None, version: int = 2) -> None:
            if a is None:
                self._note("a seed of Python's generators", 2)
            seed(generator, a, version)

        setattr(random.Random, "seed", seeded)  # noqa: B010 # which mypy does not let be assigned

    def _vary_clocks(self, holders: Holders) -> None:
        for clock in _CLOCKS:
            holders.replace(clock, self._noting(clock, "the time", lambda now: now + self._shift))
        for clock in _CLOCKS_NS:
            holders.replace(clock, self._noting(clock, "the time", lambda now: now + int(self._shift * 1e9)))
        for told in _BROKEN_DOWN:
            holders.replace(told, self._later(told))
        later, note = datetime.timedelta(seconds=self._shift), self._note
        real = datetime.datetime

        class Kind(type):
            def __instancecheck__(cls, instance: object) -> bool:
                return isinstance(instance, real)

        class Moment(datetime.datetime, metaclass=Kind):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                note("the time", 2)
                return real.now(tz) + later

            @classmethod
            def utcnow(cls) -> Any:
                note("the time", 2)
                return real.now(datetime.UTC).replace(tzinfo=None) + later

            @classmethod
            def today(cls) -> Any:
                note("the time", 2)
                return real.now() + later

        holders.replace(real, Moment)

    def _later(self, clock: Callable[..., Any]) -> Any:
        now = time.time

        @functools.wraps(clock)
        def noted(seconds: float | None = None) -> Any:
            shift = self._shift if seconds is None and self._note("the time", 2) else 0
            return clock((now() if seconds is None else seconds) + shift)

        return noted

    def _note_addresses(self) -> None:
        """Addresses are not varied, as tables that exist are keyed by them."""
        plain_id, plain_hash = builtins.id, builtins.hash

        def noted_id(item: Any) -> int:
            if not _is_of_others(sys._getframe(1).f_code.co_filename):
                self._note("id", 2)
            return plain_id(item)

        def varied_hash(item: Any) -> int:
            code = sys._getframe(1).f_code
            if code.co_name == "__hash__" or isinstance(item, (int, float, complex)):
                return plain_hash(item)
            return plain_hash(item) ^ self._seed if self._note("hash", 2) else plain_hash(item)

        builtins.id, builtins.hash = noted_id, varied_hash


def nearest_of_user(depth: int = 1) -> Source | None:
    """The line that called the standard library; None if that is a library too."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and _is_standard(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or _is_of_others(frame.f_code.co_filename):
        return None
    return Source(frame.f_code.co_filename, frame.f_lineno)


def _is_standard(file: str) -> bool:
    return file.startswith(_STANDARD) and _INSTALLED not in file


def _is_of_others(file: str) -> bool:
    return _INSTALLED in file or file.startswith((*_LIBRARIES, *_STANDARD))


def _state(what: str) -> object:
    if what == PYTHON:
        return _python_state()
    state: Any = _numpy_state()
    return state[1].tobytes(), state[2:]
