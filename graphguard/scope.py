"""What belongs to whom while code of the user's runs: checks that are marked, reports that are made, lemmas that are said.

A scope is open while a file is imported or a check runs. What happens inside belongs to the innermost one, so that nothing is
lost, and nothing leaks into the next check. Outside of all scopes, in a plain script, it belongs to the process.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Call:
    """One call of `verify` or `verify_model`, and what came of it."""

    report: Any = None
    error: BaseException | None = None


class Home(NamedTuple):
    """A file whose top level runs, at which line, and its names."""

    file: str
    line: int | None
    names: dict[str, Any]


@dataclass(frozen=True)
class Marked:
    """A function that was marked as a check while the top level of its home ran. rows: the values that it is called with."""

    function: Callable[..., Any]
    expect: str
    home: Home
    rows: tuple[Any, ...]


@dataclass(eq=False)
class Scope:
    """lemmas: by operator; None where they are left to the process. home: the only file whose lemmas it keeps, if it is set."""

    checks: list[Marked] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    lemmas: dict[str, Any] | None = field(default_factory=dict)
    home: str | None = None


_OPEN: list[Scope] = []  # no ContextVar: the threads that a check starts are part of it


@contextmanager
def opened(scope: Scope | None = None) -> Iterator[Scope]:
    """Inside, what is marked, made or registered belongs to the scope."""
    scope = Scope() if scope is None else scope
    _OPEN.append(scope)
    try:
        yield scope
    finally:
        _OPEN.remove(scope)


def innermost() -> Scope | None:
    return _OPEN[-1] if _OPEN else None


def counted(function: Callable[P, R]) -> Callable[P, R]:
    """A function that makes reports; the scope in which it is called knows of the call."""

    @functools.wraps(function)
    def counting(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        call = Call()
        if _OPEN:
            _OPEN[-1].calls.append(call)
        try:
            made = call.report = function(*args, **kwargs)
        except BaseException as error:
            call.error = error
            raise
        return made

    return counting


# ---------------------------------------------------------------------- lemmas
_OF_PROCESS: dict[str, Any] = {}


def keep_lemma(operator: str, lemma: Any) -> None:
    """A lemma that is registered now belongs to the innermost scope, or to the process; the last one for an operator holds."""
    scope = innermost()
    if scope is not None and scope.home is not None and home().file != scope.home:
        scope = None
    kept = None if scope is None else scope.lemmas
    (_OF_PROCESS if kept is None else kept)[operator] = lemma


def known_lemmas() -> dict[str, Any]:
    """By operator, the lemmas of the process and of all open scopes."""
    return _OF_PROCESS | {operator: lemma for scope in _OPEN for operator, lemma in (scope.lemmas or {}).items()}


# ---------------------------------------------------------------------- files
def home() -> Home:
    """The file whose top level runs now, the innermost of those that import each other; without a name if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>" and isinstance(file := frame.f_globals.get("__file__"), str):
            return Home(file, frame.f_lineno, frame.f_globals)
        frame = frame.f_back  # type: ignore[assignment]
    return Home("", None, {})
