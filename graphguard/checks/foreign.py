"""Code of the user's, run in this process: it cannot end the process, and what it raises becomes one sentence."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from graphguard.errors import ProgramError, first_line

try:
    import posix as system  # where `os` has these functions from
except ImportError:
    system = os  # type: ignore[misc]

_ENDINGS = ("_exit", "execv", "execve")


class Left(BaseException):
    """Code of the user's tried to end this process, or to become another program."""


@contextmanager
def staying() -> Iterator[None]:
    """Inside, what ends the process raises: a run that ends half-way with exit code 0 would look as if all were well."""
    here = os.getpid()
    originals = {(module, name): getattr(module, name) for module in (os, system) for name in _ENDINGS if hasattr(module, name)}

    def staying_instead_of(name: str, leave: Any) -> Any:
        def stay(*args: Any, **kwargs: Any) -> None:
            if os.getpid() != here:  # a fork may end as it likes
                leave(*args, **kwargs)
            raise Left(name)

        return stay

    for (module, name), leave in originals.items():
        setattr(module, name, staying_instead_of(name, leave))
    try:
        yield
    finally:
        for (module, name), leave in originals.items():
            setattr(module, name, leave)


def as_sentence(error: BaseException, file: str, who: str) -> ProgramError:
    """What was raised, with the file's own frames."""
    path = os.path.abspath(file)
    frames = tuple(
        (frame.filename, frame.lineno or 0, frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == path
    )
    where = f"{file}:{frames[-1][1]}" if frames else file
    if isinstance(error, SystemExit):
        return ProgramError(f"{where}: {who} called sys.exit()", frames)
    if isinstance(error, Left):
        return ProgramError(f"{where}: {who} called os.{error}()", frames)
    if isinstance(error, SyntaxError) and error.filename == path and error.lineno is not None:
        return ProgramError(f"{file}:{error.lineno}: {who} raised {type(error).__name__}: {error.msg}", frames)
    return ProgramError(f"{where}: {who} raised {type(error).__name__}: {first_line(error)}", frames)
