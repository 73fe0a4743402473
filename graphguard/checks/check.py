"""`@gg.check`: functions that return a report, and what comes out of running them."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, overload

from graphguard.checks.foreign import as_sentence, staying
from graphguard.checks.row import WITHOUT, Row, fitting, rows_of
from graphguard.errors import GraphGuardError, UsageError, first_line
from graphguard.report.report import VERSION, NotVerifiedError, Report
from graphguard.scope import Marked, Scope, home, innermost, opened

VERDICTS = ("verified", "refuted", "unproven")
MARK = "__graphguard_check__"
IMPORT = "import"  # in the place of the name of a check, where a file cannot be imported; no function has this name


@dataclass(frozen=True)
class Check:
    """One row of a function that is marked. `function` is None where another process has it."""

    name: str
    file: str
    function: Callable[..., Any] | None
    expect: str
    line: int | None = None
    row: Row = WITHOUT

    def __str__(self) -> str:
        return f"{self.file}::{self.name}"

    def to_send(self) -> Check:
        """Without what another process cannot have, or would have to import modules of the user's for."""
        return replace(self, function=None, row=WITHOUT)

    def run(self) -> Any:
        """What the check returns; what it raises becomes one sentence."""
        assert self.function is not None
        needed = _needed(self.function, self.row)
        if needed and self.row.values:
            raise UsageError(f"the check {self.name} takes {needed} too; give @gg.check a list of values for it")
        if needed:
            raise UsageError(f"the check {self.name} takes {needed}; a check takes no arguments")
        here = os.getpid()
        try:
            with staying():
                return self.function(**self.row.arguments())
        except (GraphGuardError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise as_sentence(error, self.file, f"the check {self.name}") from None
        finally:
            if os.getpid() != here:  # a fork that the check made and forgot would go on with the run
                os._exit(1)

    def outcome(self) -> Outcome:
        """What comes of running the check. What it prints goes to stderr: stdout is for results."""
        returned, raised = None, None
        try:
            with opened() as scope, redirect_stdout(sys.stderr):
                try:
                    returned = self.run()
                except NotVerifiedError as error:
                    raised = error
            return Outcome(self, settled(self.name, self.expect, scope, returned, raised), None)
        except GraphGuardError as error:
            return Outcome(self, None, error)


def settled(name: str, expect: str, scope: Scope, returned: Any, raised: NotVerifiedError | None = None) -> Report:
    """The one report of a check that has run. A report that it made and did not return is an error, whatever its verdict: what
    nobody looks at might as well not have been made."""
    who = f"the check {name}"
    if scope.checks:
        marked = ", ".join(_name_of(each.function) for each in scope.checks)
        raise UsageError(
            f"{who} marks {marked} as a check while it runs, which is too late; mark it where the file is imported"
        )
    for call in scope.calls:
        if call.error is not None:
            raise UsageError(f"{who} catches an error of gg.verify, so a report is missing: {first_line(call.error)}")
    made = [call.report for call in scope.calls]
    if len(made) > 1:
        raise UsageError(f"{who} makes {len(made)} reports; a check makes one and returns it, so write one check for each")
    if raised is not None:
        if expect != "verified":
            raise UsageError(f"{who} expects {expect}, but raises unless it is verified; return gg.verify(...) instead")
        returned = raised.report
    if not isinstance(returned, Report):
        if inspect.iscoroutine(returned):
            returned.close()  # else Python warns that nobody waits for it
        raise UsageError(f"{who} returned {type(returned).__name__}; it must return gg.verify(...)")
    if made and returned is not made[0]:
        raise UsageError(f"{who} makes a report and returns another; return the one that it makes")
    return returned


@dataclass(frozen=True)
class Outcome:
    """The report of a check, or the error that kept it from having one."""

    check: Check
    report: Report | None
    error: GraphGuardError | None
    strict: bool = False  # whether a verdict under conditions, or along paths, is a failure

    @property
    def as_expected(self) -> bool:
        expected = self.report is not None and self.report.verdict == self.check.expect
        return expected and not self.has_forbidden_conditions

    @property
    def has_forbidden_conditions(self) -> bool:
        """Whether the verdict is the expected one but for its conditions, or but for being along paths."""
        verified = self.report is not None and self.report.verdict == self.check.expect == "verified"
        return verified and self.strict and bool(self.report and (self.report.conditions or self.report.paths is not None))

    @property
    def exit_code(self) -> int:
        """0: as expected; 1: a definite verdict, and not the expected one; 2: it could not run; 3: unproven, or proved under
        conditions where these are a failure."""
        if self.report is None:
            return 2
        if self.as_expected:
            return 0
        return 3 if self.report.verdict == "unproven" or self.has_forbidden_conditions else 1

    @property
    def complaint(self) -> str:
        """The error, with the check whose error it is; that of a file names the file by itself."""
        text = str(self.error)
        return text if self.check.name == IMPORT and self.check.file in text else f"{self.check}: {text}"

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
    """That of all checks together: an error counts most, then a wrong verdict, then a missing one. No check is an error."""
    codes = {outcome.exit_code for outcome in outcomes} or {2}
    return next((code for code in (2, 1, 3) if code in codes), 0)


# ---------------------------------------------------------------------- marks
F = TypeVar("F", bound=Callable[..., Any])


class Mark(NamedTuple):
    """What a function that is a check carries with it, for pytest and `gg.verify_many`. file: whose top level has marked it."""

    expect: str
    rows: tuple[Row, ...]
    file: str


@overload
def check(function: F, /) -> F: ...
@overload
def check(*, expect: str = "verified", **parameters: Sequence[Any]) -> Callable[[F], F]: ...
def check(function: Any = None, /, *, expect: str = "verified", **parameters: Sequence[Any]) -> Any:
    """Mark a function that returns a report. `expect` is the verdict that it should have.

    parameters: `mesh=[{"tp": 2}, {"tp": 4}]` calls the function once with each of these values; with several of them, once with
        each combination. Each is a check of its own, `name[tp=2]`.

    A check is registered here: it runs, wherever the function is kept."""
    if expect not in VERDICTS:
        raise UsageError(f"@gg.check(expect={expect!r}): the verdict is one of {', '.join(VERDICTS)}")
    rows = rows_of(parameters)

    def mark(marked: Any) -> Any:
        if not callable(marked):
            raise UsageError(f"@gg.check marks a function, not {type(marked).__name__}")
        fitting(marked, parameters, _name_of(marked))
        with suppress(AttributeError, TypeError):  # a builtin takes no attributes; the mark is for pytest
            setattr(marked, MARK, Mark(expect, rows, home().file))
        scope = innermost()
        if scope is None and _is_left_to_pytest(marked):
            raise UsageError(
                f"pytest runs the check {_name_of(marked)} without GraphGuard's plugin, so nobody would look at its report; "
                "add -p graphguard.pytest_plugin"
            )
        if scope is not None:
            if any(each.function is marked for each in scope.checks):
                raise UsageError(f"@gg.check marks {_name_of(marked)} twice; mark it once")
            scope.checks.append(Marked(marked, expect, home(), rows))
        return marked

    return mark if function is None else mark(function)


def _is_left_to_pytest(function: Any) -> bool:
    """Whether pytest collects it by its name, and drops what it returns."""
    collects = "PYTEST_VERSION" in os.environ and "_pytest.python" in sys.modules
    return (
        collects and "graphguard.pytest_plugin" not in sys.modules and _name_of(function).rpartition(".")[2].startswith("test")
    )


def named(marks: Sequence[Marked], file_of: Callable[[str], str]) -> list[Check]:
    """The checks of what was marked, each with a name of its own: a second one of a name is `name#2`."""
    checks: list[Check] = []
    counts: Counter[tuple[str, str]] = Counter()
    for each in marks:
        file, name, line = file_of(each.home.file), _name_of(each.function, each.home.names), _line_of(each)
        for row in each.rows:
            full = f"{name}[{row.label}]" if row.label else name
            counts[file, full] += 1
            count = counts[file, full]
            checks.append(Check(full if count == 1 else f"{full}#{count}", file, each.function, each.expect, line, row))
    return checks


def path_of(function: Any) -> str:
    """`file.py::name` of a function that is marked."""
    mark = getattr(function, MARK, None)
    if not isinstance(mark, Mark):
        raise UsageError(f"{_name_of(function)} is no check; mark it with @gg.check, or give the path of a file")
    if not mark.file or not os.path.isfile(mark.file):
        raise UsageError(f"the check {_name_of(function)} is in no file, so no other process can import it; write it to one")
    module = sys.modules.get(getattr(_plain(function), "__module__", ""))
    return f"{mark.file}::{_name_of(function, vars(module) if module else {})}"


def has_name(check: Check, name: str) -> bool:
    """Whether a name selects the check: its own, or that of all rows of its function, or of all that have it."""
    unnumbered = check.name.partition("#")[0]
    return name in (check.name, unnumbered, unnumbered.partition("[")[0])


def _name_of(function: Any, names: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Its own name, with that of its class; where its file knows it by another name alone, that one."""
    plain = _plain(function)
    own = str(getattr(plain, "__qualname__", None) or type(plain).__name__).rpartition("<locals>.")[2]
    given = str(getattr(plain, "__name__", own))
    own = own if own.rpartition(".")[2] == given else given  # another name that was given to it
    known = [name for name, value in names.items() if value is function]
    return known[0] if known and own not in known else own.replace("<lambda>", "lambda")


def _line_of(marked: Marked) -> int | None:
    code = getattr(_plain(marked.function), "__code__", None)
    return code.co_firstlineno if code is not None and code.co_filename == marked.home.file else marked.home.line


def _plain(function: Any) -> Any:
    """Without what is around it."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)


def _needed(function: Callable[..., Any], row: Row) -> str:
    """The parameters without which it cannot be called, and which the row does not have."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin has no signature
        return ""
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in optional]
    return ", ".join(name for name in needed if name not in row.values)
