"""`@gg.check`: functions that a command line or a test runner finds in files, and what comes out of running them."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, overload

from graphguard.errors import GraphGuardError, ProgramError, UsageError, first_line
from graphguard.report import VERSION, NotVerifiedError, Report

VERDICTS = ("verified", "refuted", "unproven")
_MARK = "__graphguard_expect__"


@dataclass(frozen=True)
class Check:
    name: str
    file: str
    function: Callable[[], Any]
    expect: str

    def __str__(self) -> str:
        return f"{self.file}::{self.name}"

    @property
    def line(self) -> int | None:
        """Where it is defined."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return None if code is None else code.co_firstlineno

    def run(self) -> Any:
        """What the check returns; what it raises becomes one sentence."""
        try:
            with _staying():
                return self.function()
        except (GraphGuardError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise _raised(error, self.file, f"the check {self.name}") from None

    def outcome(self) -> Outcome:
        """What comes of running the check. What it prints goes to stderr: stdout is for results."""
        try:
            with redirect_stdout(sys.stderr):
                report = self.run()
        except NotVerifiedError as error:
            report = error.report
        except GraphGuardError as error:
            return Outcome(self, None, error)
        if not isinstance(report, Report):
            if inspect.iscoroutine(report):
                report.close()  # else Python warns that nobody waits for it
            wrong = UsageError(f"the check {self.name} returned {type(report).__name__}; it must return gg.verify(...)")
            return Outcome(self, None, wrong)
        return Outcome(self, report, None)


@dataclass(frozen=True)
class Outcome:
    """The report of a check, or the error that kept it from having one."""

    check: Check
    report: Report | None
    error: GraphGuardError | None
    strict: bool = False  # whether a verdict under conditions is a failure

    @property
    def as_expected(self) -> bool:
        expected = self.report is not None and self.report.verdict == self.check.expect
        return expected and not self.has_forbidden_conditions

    @property
    def has_forbidden_conditions(self) -> bool:
        """Whether the verdict is the expected one but for its conditions."""
        verified = self.report is not None and self.report.verdict == self.check.expect == "verified"
        return verified and self.strict and bool(self.report and self.report.conditions)

    @property
    def exit_code(self) -> int:
        """0: as expected; 1: a definite verdict, and not the expected one; 2: it could not run; 3: unproven, or proved under
        conditions where these are a failure."""
        if self.report is None:
            return 2
        if self.as_expected:
            return 0
        return 3 if self.report.verdict == "unproven" or self.has_forbidden_conditions else 1

    def to_plain(self) -> dict[str, Any]:
        """As JSON has it. A check that could not run has an error instead of a verdict, and nothing in its report."""
        check = self.check
        head = {"name": check.name, "file": check.file, "line": check.line, "expect": check.expect, "strict": self.strict}
        if self.report is None:
            return {**head, **Report("").to_plain(), "verdict": None, "error": str(self.error)}
        return {**head, **self.report.to_plain(), "error": None}


def to_plain(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """The JSON of all checks, of which the other formats are projections."""
    return {"version": VERSION, "checks": [outcome.to_plain() for outcome in outcomes]}


def exit_code(outcomes: Iterable[Outcome]) -> int:
    """That of all checks together: an error counts most, then a wrong verdict, then a missing one."""
    codes = {outcome.exit_code for outcome in outcomes}
    return next((code for code in (2, 1, 3) if code in codes), 0)


@overload
def check(function: Callable[[], Any], /) -> Callable[[], Any]: ...
@overload
def check(*, expect: str = "verified") -> Callable[[Callable[[], Any]], Callable[[], Any]]: ...
def check(function: Callable[[], Any] | None = None, /, *, expect: str = "verified") -> Any:
    """Mark a function without arguments that returns a report. `expect` is the verdict that it should have."""
    if expect not in VERDICTS:
        raise UsageError(f"@gg.check(expect={expect!r}): the verdict is one of {', '.join(VERDICTS)}")

    def mark(marked: Callable[[], Any]) -> Callable[[], Any]:
        if not callable(marked):
            raise UsageError(f"@gg.check marks a function, not {type(marked).__name__}")
        setattr(marked, _MARK, expect)
        return marked

    return mark if function is None else mark(function)


def find_checks(target: str) -> list[Check]:
    """The checks of `file.py` in the order of the file, or the one that `file.py::name` names."""
    file, named, name = target.partition("::")
    if not os.path.isfile(file):
        raise UsageError(f"there is no file {file}")
    checks = _checks_of(file)
    if not checks:
        raise UsageError(f"{file} has no checks; mark a function with @gg.check")
    if named:
        chosen = [check for check in checks if check.name == name]
        if not chosen:
            raise UsageError(f"{file} has no check {name!r}; it has {', '.join(check.name for check in checks)}")
        return chosen
    return checks


def find_all_checks(targets: Iterable[str]) -> list[Check]:
    """The checks of files, of single names in files, and of all files below folders; each once."""
    found: dict[tuple[str, str], Check] = {}
    for target in targets:
        if os.path.isdir(target):
            checks = [check for file in _files_below(target) for check in _checks_of(file)]
            if not checks:
                raise UsageError(f"no file below {target} has checks; mark a function with @gg.check")
        else:
            checks = find_checks(target)
        for check in checks:
            found.setdefault((os.path.abspath(check.file), check.name), check)
    return list(found.values())


def _files_below(folder: str) -> Iterator[str]:
    """Python files that mention the package: others have no checks, and importing them may do anything."""
    for path in sorted(Path(folder).rglob("*.py"), key=lambda path: (len(path.parts), path)):
        hidden = any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(folder).parts)
        if not hidden and b"graphguard" in path.read_bytes():
            yield str(path)


def _checks_of(file: str) -> list[Check]:
    module = load(file)
    return [
        Check(attribute, file, item, getattr(item, _MARK))
        for attribute, item in vars(module).items()
        if callable(item) and _is_marked(item, module)
    ]


def _is_marked(item: Any, module: ModuleType) -> bool:
    """Whether it is a check of this module. An object that raises when asked, as some do that load late, is none."""
    try:
        return hasattr(item, _MARK) and getattr(item, "__module__", None) == module.__name__
    except Exception:
        return False


def load(file: str) -> ModuleType:
    """Import a file by its path, as the module of its name, with its own folder importable. A name that is taken (by the
    standard library, or by a file of another folder) gets a number: other modules must not lose theirs."""
    if not os.path.isfile(file):
        raise UsageError(f"there is no file {file}")
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
        with redirect_stdout(sys.stderr), _staying():
            spec.loader.exec_module(module)
    except (GraphGuardError, KeyboardInterrupt):
        del sys.modules[name]
        raise
    except BaseException as error:
        del sys.modules[name]
        raise _raised(error, file, "importing the file") from None
    return module


class _Left(BaseException):
    """Code of the user's tried to end this process."""


@contextmanager
def _staying() -> Iterator[None]:
    """Inside, os._exit raises: a run that ends half-way with exit code 0 would look as if all were well."""
    here, leave = os.getpid(), os._exit

    def stay(status: int) -> None:
        if os.getpid() != here:  # a fork may end as it likes
            leave(status)
        raise _Left(status)

    os._exit = stay  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = leave


def _raised(error: BaseException, file: str, who: str) -> ProgramError:
    """The error with the file's own frames."""
    frames = tuple(
        (frame.filename, frame.lineno or 0, frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == os.path.abspath(file)
    )
    where = f"{file}:{frames[-1][1]}" if frames else file
    if isinstance(error, (SystemExit, _Left)):
        return ProgramError(f"{where}: {who} called {'sys.exit()' if isinstance(error, SystemExit) else 'os._exit()'}", frames)
    if isinstance(error, SyntaxError) and error.filename == os.path.abspath(file) and error.lineno is not None:
        return ProgramError(f"{file}:{error.lineno}: {who} raised {type(error).__name__}: {error.msg}", frames)
    return ProgramError(f"{where}: {who} raised {type(error).__name__}: {first_line(error)}", frames)
