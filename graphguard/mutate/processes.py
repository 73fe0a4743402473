"""Work in several processes that tell what they find as they find it. One that dies takes nothing with it but its last step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

Begin = Callable[[str], None]  # told what is begun, in words


@dataclass
class _Worker:
    process: BaseProcess
    messages: Connection
    begun: str = "nothing was begun"


@dataclass(frozen=True)
class Died:
    """A process that ended before its work did."""

    words: str


def in_processes(work: Callable[[int, Begin], Iterator[Any]], count: int) -> Iterator[Any]:
    """What `work(number, begin)` yields in each process, and a Died for each that does not reach its end."""
    workers = [_started(work, number) for number in range(count)]
    while workers:
        for ready in wait([worker.messages for worker in workers]):
            worker = next(each for each in workers if each.messages is ready)
            try:
                kind, message = worker.messages.recv()
            except EOFError:
                kind, message = "died", None
            match kind:
                case "begun":
                    worker.begun = message
                case "found":
                    yield message
                case _:
                    worker.process.join()
                    workers.remove(worker)
                    if kind == "died":
                        yield Died(f"a process ended with exit code {worker.process.exitcode}; {worker.begun}")
                    elif message is not None:
                        yield Died(f"a process stopped with {message}; {worker.begun}")


def _started(work: Callable[[int, Begin], Iterator[Any]], number: int) -> _Worker:
    context = get_context("fork")  # what is worked on cannot be sent, so it is inherited
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(work, number, theirs), daemon=True)
    process.start()
    theirs.close()  # so that its end is seen when the process dies
    return _Worker(process, ours)


def _run(work: Callable[[int, Begin], Iterator[Any]], number: int, messages: Connection) -> None:
    try:
        for found in work(number, lambda words: messages.send(("begun", words))):
            messages.send(("found", found))
        messages.send(("end", None))
    except Exception as error:
        messages.send(("end", f"{type(error).__name__}: {error}"))
