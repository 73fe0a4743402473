"""One forked process per program, so that what a program leaves behind is gone with it.

A fork starts from the state that this process has now, costs a few milliseconds, and may be patched at will.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import selectors
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch

from graphguard.errors import GraphGuardError, InternalError, ProgramError

Task = Callable[[], bytes]


def run_isolated(tasks: Sequence[Task], workers: int | None = None) -> Iterator[tuple[int, bytes | GraphGuardError]]:
    """Run each task in a fork of its own; (index, result) as they finish. A task returns bytes or raises."""
    workers = workers or max(1, min(len(tasks), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2))
    waiting = list(enumerate(tasks))[::-1]
    children: dict[int, _Child] = {}
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or children:
                while waiting and len(children) < workers:
                    index, task = waiting.pop()
                    child = _Child(index, task)
                    children[child.pipe] = child
                    selector.register(child.pipe, selectors.EVENT_READ)
                for key, _ in selector.select():
                    child = children[key.fd]
                    if child.read():
                        selector.unregister(key.fd)
                        del children[key.fd]
                        yield child.index, child.result()
        finally:
            for child in children.values():
                child.kill()


class _Child:
    def __init__(self, index: int, task: Task):
        self.index, self._chunks = index, list[bytes]()
        self.pipe, write_end = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12+ on fork beside threads; ours run no code
            self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            _work(task, write_end)
        os.close(write_end)

    def read(self) -> bool:
        """Take what there is; True at the end."""
        chunk = os.read(self.pipe, 1 << 20)
        self._chunks.append(chunk)
        return not chunk

    def result(self) -> bytes | GraphGuardError:
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        data = b"".join(self._chunks)
        if not data:
            how = f"signal {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else f"exit code {status >> 8}"
            return ProgramError(f"the program ended its process ({how}) before it returned")
        if data[:1] == b"+":
            return data[1:]
        return pickle.loads(data[1:])  # type: ignore[no-any-return]

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pipe)


def _work(task: Task, pipe: int) -> None:
    """The child's life: it never returns into the parent's code."""
    answer = b"-"
    try:
        os.dup2(2, 1)  # what programs print must not mix with our results
        sys.stdout = sys.stderr
        warnings.simplefilter("ignore")  # every rank would repeat them
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it logs what the program then raises
        torch.set_num_threads(1)  # a thread pool does not survive a fork
        gc.disable()  # the process is short-lived; a collection would touch, and so copy, every page of the parent
        answer = b"+" + task()
    except GraphGuardError as error:
        answer = _told(error)
    except BaseException as error:
        answer = _told(InternalError(f"{type(error).__name__} in GraphGuard itself: {error}; please report it"))
    finally:
        view = memoryview(answer)
        while view:
            view = view[os.write(pipe, view) :]
        sys.stderr.flush()
        os._exit(0)


def _told(error: GraphGuardError) -> bytes:
    """An error for the parent; its text alone where a program has left too little room for all of it."""
    try:
        return b"-" + pickle.dumps(error)
    except Exception:
        return b"-" + pickle.dumps(ProgramError(str(error)))
