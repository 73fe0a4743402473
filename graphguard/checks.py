"""`@gg.check`: functions that a command line or a test runner finds in a file."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, overload

from graphguard.errors import GraphGuardError, ProgramError, UsageError

VERDICTS = ("verified", "refuted", "unproven")
_MARK = "__graphguard_expect__"


@dataclass(frozen=True)
class Check:
    name: str
    file: str
    function: Callable[[], Any]
    expect: str

    def run(self) -> Any:
        """What the check returns; what it raises becomes one sentence."""
        try:
            return self.function()
        except GraphGuardError:
            raise
        except (Exception, SystemExit) as error:
            raise _raised(error, self.file, f"the check {self.name}") from None


@overload
def check(function: Callable[[], Any], /) -> Callable[[], Any]: ...
@overload
def check(*, expect: str = "verified") -> Callable[[Callable[[], Any]], Callable[[], Any]]: ...
def check(function: Callable[[], Any] | None = None, /, *, expect: str = "verified") -> Any:
    """Mark a function without arguments that returns a report. `expect` is the verdict that it should have."""
    if expect not in VERDICTS:
        raise UsageError(f"@gg.check(expect={expect!r}): the verdict is one of {', '.join(VERDICTS)}")

    def mark(marked: Callable[[], Any]) -> Callable[[], Any]:
        setattr(marked, _MARK, expect)
        return marked

    return mark if function is None else mark(function)


def find_checks(target: str) -> list[Check]:
    """The checks of `file.py` in the order of the file, or the one that `file.py::name` names."""
    file, _, name = target.partition("::")
    if not os.path.isfile(file):
        raise UsageError(f"there is no file {file}")
    module = _load(file)
    checks = [
        Check(attribute, file, item, getattr(item, _MARK))
        for attribute, item in vars(module).items()
        if callable(item) and hasattr(item, _MARK) and getattr(item, "__module__", None) == module.__name__
    ]
    if not checks:
        raise UsageError(f"{file} has no checks; mark a function with @gg.check")
    if name:
        chosen = [check for check in checks if check.name == name]
        if not chosen:
            raise UsageError(f"{file} has no check {name!r}; it has {', '.join(check.name for check in checks)}")
        return chosen
    return checks


def _load(file: str) -> ModuleType:
    """Import a file by its path, as the module of its name, with its own folder importable. A name that is taken (by the
    standard library, or by a file of another folder) gets a number: other modules must not lose theirs."""
    path = os.path.abspath(file)
    stem = name = os.path.splitext(os.path.basename(path))[0]
    count = 1
    while name in sys.modules and getattr(sys.modules[name], "__file__", None) != path:
        count += 1
        name = f"{stem}_{count}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if os.path.dirname(path) not in sys.path:
        sys.path.insert(0, os.path.dirname(path))
    try:
        spec.loader.exec_module(module)
    except GraphGuardError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _raised(error, file, "importing the file") from None
    return module


def _raised(error: BaseException, file: str, who: str) -> ProgramError:
    """The error with the file's own frames."""
    frames = tuple(
        (frame.filename, frame.lineno or 0, frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == os.path.abspath(file)
    )
    where = f"{file}:{frames[-1][1]}" if frames else file
    if isinstance(error, SystemExit):
        return ProgramError(f"{where}: {who} called sys.exit()", frames)
    text = str(error).strip().split("\n")[0]
    return ProgramError(f"{where}: {who} raised {type(error).__name__}: {text}", frames)
