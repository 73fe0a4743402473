"""A process that has torch loaded, and forks workers.

Each file of checks needs a process of its own, and torch takes seconds to import. A fork of whoever runs the checks would be
quick, but an executor has threads, and a fork beside threads may wait for ever for a lock that one of them held. So a process
without threads is started once; it loads what every check needs, and forks when it is asked to.

A worker lives as long as the line between its owner and the nursery is held: when the owner lets go of it, or dies, the worker
and all that it has started are killed. When the worker ends, the line says how.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn

from graphguard.errors import InternalError

_START = "import sys; sys.path[:] = sys.argv[2:]; from graphguard.checks.nursery import main; main(int(sys.argv[1]))"
_LOOK_AROUND = 5000  # milliseconds after which a nursery sees whether its owner is there
_FDS = 3  # that come with the wish for a worker: its pipe, its line, its stderr


class Worker:
    """The owner's side of a process that serves one file."""

    def __init__(self, pipe: Connection, line: socket.socket):
        self.pipe, self.line = pipe, line

    def end(self) -> str:
        """Wait for it, and say how it ended."""
        said = b""
        with suppress(OSError):
            while part := self.line.recv(100):
                said += part
        return said.decode() or "with the process that it was forked from"

    def kill(self) -> None:
        """With all that it has started. Whoever talks with it notices."""
        with suppress(OSError):
            self.line.shutdown(socket.SHUT_WR)

    def stop(self) -> None:
        """Kill it unless it has ended, and wait for that. For whom it belongs to: nobody else may talk with it."""
        self.kill()
        self.end()
        self.line.close()
        self.pipe.close()


class _Nursery:
    """The owner's side."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.control, theirs = socket.socketpair()
        with theirs:
            path = [entry for entry in sys.path if isinstance(entry, str)]
            self.process = subprocess.Popen(
                # -P and another folder: a file json.py of the user's is not to be taken for Python's
                [sys.executable, "-P", "-c", _START, str(theirs.fileno()), *path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if sys.__stderr__ is not None else subprocess.DEVNULL,
                cwd=os.sep,
                start_new_session=True,  # Ctrl-C is for the owner, who stops its workers
            )

    def fork(self) -> Worker:
        (pipe, its_pipe), (line, its_line) = socket.socketpair(), socket.socketpair()
        errors = os.dup(2) if sys.__stderr__ is not None else os.open(os.devnull, os.O_WRONLY)
        try:
            socket.send_fds(self.control, [b"w"], [its_pipe.fileno(), its_line.fileno(), errors])
        finally:
            its_pipe.close()
            its_line.close()
            os.close(errors)
        return Worker(Connection(pipe.detach()), line)

    @property
    def is_there(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None


_lock = threading.Lock()
_nurseries: list[_Nursery] = []  # at most one


def new_worker() -> Worker:
    """A worker that waits to be told its setting. A nursery that has died, or that belongs to whom this was forked from, is
    replaced."""
    with _lock:
        for _ in range(2):
            if not _nurseries or not _nurseries[0].is_there:
                _nurseries[:] = [_Nursery()]
            try:
                return _nurseries[0].fork()
            except OSError:
                _nurseries.clear()
        raise InternalError("the process that workers are forked from does not answer")


# ---------------------------------------------------------------------- inside of the nursery
def main(control: int) -> NoReturn:
    """What a nursery does, until its owner is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nursery = _Server(socket.socket(fileno=control))
    with suppress(ImportError):  # where torch is missing, the files say so
        import graphguard.api  # noqa: F401
    try:
        nursery.serve()
    finally:
        nursery.stop()
        os._exit(0)


class _Server:
    def __init__(self, control: socket.socket):
        self.control, self.owner = control, os.getppid()
        self.living: dict[int, tuple[int, socket.socket]] = {}  # by the number of its line: a worker's pid, and the line
        self.wake, self.woken = os.pipe()
        os.set_blocking(self.woken, False)

    def serve(self) -> None:
        signal.set_wakeup_fd(self.woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # it is the pipe that tells
        while os.getppid() == self.owner:
            ready = self._ready()
            if self.wake in ready:
                os.read(self.wake, 4096)
            for number in ready & self.living.keys():  # nobody writes to a line: the owner has let go of it
                self._kill(self.living[number][0])
            self._bury()
            if self.control.fileno() in ready and not self._receive():
                return

    def _ready(self) -> set[int]:
        poll = select.poll()
        for number in (self.control.fileno(), self.wake, *self.living):
            poll.register(number, select.POLLIN)
        return {number for number, _ in poll.poll(_LOOK_AROUND)}

    def _bury(self) -> None:
        """Tell the lines of workers that have ended how they did."""
        for number, (pid, line) in list(self.living.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            self._kill(pid)  # what it has left behind
            code = os.waitstatus_to_exitcode(status)
            with suppress(OSError):
                line.sendall(f"by signal {-code}".encode() if code < 0 else f"with exit code {code}".encode())
            line.close()
            del self.living[number]

    def _receive(self) -> bool:
        """A wish for a worker; False if the owner is gone."""
        message, fds, _, _ = socket.recv_fds(self.control, 1, _FDS)
        if not message or len(fds) != _FDS:
            return False
        pipe, number, errors = fds
        line = socket.socket(fileno=number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12+ on fork beside threads; ours run no code
            pid = os.fork()
        if pid == 0:
            line.close()
            self._become_worker(pipe, errors)
        os.close(pipe)
        os.close(errors)
        self.living[number] = pid, line
        return True

    def _become_worker(self, pipe: int, errors: int) -> NoReturn:
        """Its stdout is stderr: results go through the pipe. It leads a session of its own, so that all of its ranks can be
        stopped with it."""
        code = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number in (self.control.fileno(), self.wake, self.woken, *self.living):
                os.close(number)  # else nobody would notice that their other ends are gone
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(errors, 2)
            os.dup2(2, 1)
            os.close(errors)
            from graphguard.checks.worker import serve

            serve(Connection(pipe))
            code = 0
        finally:
            os._exit(code)

    def stop(self) -> None:
        for pid, _ in self.living.values():
            self._kill(pid)

    @staticmethod
    def _kill(pid: int) -> None:
        for kill in (os.killpg, os.kill):  # the group is there as soon as the worker has made it
            with suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
