"""Other threads and processes of a program: what they do with tensors is not recorded."""

from __future__ import annotations

import _thread
import functools
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

from graphguard.capture.torch.escapes.ambient import nearest_of_user
from graphguard.errors import CaptureError

if TYPE_CHECKING:
    from graphguard.capture.torch.adapters.holders import Holders
    from graphguard.capture.torch.record.recorder import Recorder
    from graphguard.graph.ir import Source

_PROGRAMS = {"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec"}


def watch_processes(recorder: Recorder, holders: Holders) -> None:
    """Refuse what would be missed. Patches threads for the rest of this process."""
    _refuse_tensors_in_threads(recorder)
    _refuse_bare_threads(recorder, holders)
    sys.addaudithook(functools.partial(_audit, recorder))


class _OtherThread(TorchDispatchMode):
    """Recording is by thread: an operator in another one would run on tensors without data, and leave no trace."""

    def __init__(self, recorder: Recorder, started: Source | None):
        super().__init__()
        self._recorder, self._started = recorder, started

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        error = CaptureError(f"{func} runs in a thread that is started here, and is not recorded there; work on tensors in one")
        self._recorder.failure = self._recorder.failure or error.located(str(self._started))
        raise error


def _refuse_tensors_in_threads(recorder: Recorder) -> None:
    start = threading.Thread.start

    @functools.wraps(start)
    def start_watched(self: threading.Thread) -> None:
        run, (source, _) = self.run, recorder.sources.here()

        def watched() -> None:
            with _OtherThread(recorder, source), suppress(CaptureError):  # it is told when the program ends
                run()

        self.run = watched  # type: ignore[method-assign]
        start(self)

    threading.Thread.start = start_watched  # type: ignore[method-assign]


def _refuse_bare_threads(recorder: Recorder, holders: Holders) -> None:
    """Below `threading` there is no place to watch from."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise _refused(recorder, "the program starts a thread with _thread, in which nothing is recorded; use threading, and "
                       "leave tensors to one thread")  # fmt: skip

    start = threading._start_new_thread  # type: ignore[attr-defined]
    holders.replace(start, refused)
    _thread.start_new = refused  # its old name
    threading._start_new_thread = start  # type: ignore[attr-defined]


def _audit(recorder: Recorder, event: str, args: tuple[Any, ...]) -> None:
    """CPython tells of every process, whatever the name by which the program starts it."""
    if event in ("os.fork", "os.forkpty"):
        raise _refused(recorder, "the program forks, and what it does with tensors in another process is not recorded; work on "
                       "tensors in one process")  # fmt: skip
    if event in _PROGRAMS:
        recorder.assume(f"what the program that is run at {nearest_of_user(2)} answers is the same on every rank")


def _refused(recorder: Recorder, message: str) -> CaptureError:
    recorder.locate()
    return recorder.failed(CaptureError(message))
