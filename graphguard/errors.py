"""What can go wrong, in words for the person who runs the tool. Each message is one sentence: what, where, what to do."""

from __future__ import annotations

import signal
import traceback
from types import CodeType
from typing import Any


class GraphGuardError(Exception):
    """Base of everything that GraphGuard raises on purpose. The command line prints it and exits with code 2."""


class UsageError(GraphGuardError):
    """The call itself is off: an unknown input name, a placement that does not fit, a mesh of size zero."""


class CaptureError(GraphGuardError):
    """The program does something that has no exact graph, such as reading the value of an input."""

    def located(self, where: str) -> CaptureError:
        return type(self)(f"{where}: {self}")


class ReadsValuesError(CaptureError):
    """The program reads a value that depends on inputs: it has a graph along the path of a sample alone."""


class ProgramError(GraphGuardError):
    """The user's program raised. Only the user's own frames are kept, the last of them, as (file, line, function)."""

    MOST_FRAMES = 20

    def __init__(self, message: str, frames: tuple[tuple[str, int, str], ...] = (), before: Any = None):
        super().__init__(message)
        self.frames = frames[-self.MOST_FRAMES :]
        self.before = before  # the graph of what a rank had communicated until then

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.frames, self.before)


class MismatchError(ProgramError):
    """The user's program raised after communication that does not fit together, which a real run would say first."""

    def __init__(self, message: str, finding: Any):
        super().__init__(message)
        self.finding = finding  # what does not fit together

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.finding)


def is_by_signal(error: BaseException) -> bool:
    """Whether an error was raised by a handler of signals, such as a limit of time that the user set."""
    handlers = [signal.getsignal(each) for each in signal.valid_signals()]
    codes = {_code_of(handler) for handler in handlers if callable(handler)} - {None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: Any) -> CodeType | None:
    """Of a function, a method, or an object that can be called."""
    function = getattr(handler, "__func__", handler)
    found = getattr(function, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    return found if isinstance(found, CodeType) else None


def first_line(error: BaseException) -> str:
    """The first line of what an exception of the user's says. Its own code makes the text, and may fail at that."""
    try:
        return str(error).strip().split("\n")[0]
    except Exception:
        return "(its text cannot be read)"


class GraphFormatError(GraphGuardError):
    """A saved graph that cannot be loaded: damaged, hostile, or of another version."""


class MalformedGraphError(GraphGuardError):
    """A graph breaks a rule of well-formedness: a defect of GraphGuard, never of the user's program."""


class ReplayError(GraphGuardError):
    """A graph cannot be executed as asked."""


class UnsteadyError(ReplayError):
    """An operator of the user's own is no function of its operands, which every verdict takes it for."""


class InternalError(GraphGuardError):
    """A defect of GraphGuard itself; the message asks for a report."""
