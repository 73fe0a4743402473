"""Loaded by pytest: a test that is a check fails unless its verdict is the expected one, a lemma of a test module is for this
module, and `assert_refines` can leave its verdict in the properties of the running test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from graphguard.scope import Scope, opened

_running: list[Any] = []
_modules: dict[str, Scope] = {}  # by file: the lemmas of test modules


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[Any]:
    """A test has the lemmas that it registers for itself."""
    _running.append(item)
    try:
        with opened():
            return (yield)
    finally:
        _running.pop()


def record(name: str, value: str) -> None:
    """A property of the running test, as `record_property` makes it: JUnit XML has it."""
    if _running:
        _running[-1].user_properties.append((name, value))


# ---------------------------------------------------------------------- lemmas
@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: Any) -> Iterator[Any]:
    """While a test module is imported, its lemmas are its own. Those of a module that it imports are for all: Python imports
    it once."""
    if not isinstance(collector, pytest.Module):
        return (yield)
    with opened(_modules.setdefault(str(collector.path), Scope(home=str(collector.path)))):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[Any]:
    """A test has the lemmas of its module. Those of fixtures are for all tests: which test comes first must not matter."""
    path = str(item.path)
    with opened(_modules.setdefault(path, Scope(home=path))):
        return (yield)


# ---------------------------------------------------------------------- checks
def pytest_generate_tests(metafunc: Any) -> None:
    """A check with parameters is a test for each row, with its name."""
    from graphguard.checks.check import MARK

    mark = getattr(metafunc.function, MARK, None)
    if mark is None or not mark.rows[0].values:
        return
    names = list(mark.rows[0].values)
    values = [tuple(row.arguments()[name] for name in names) for row in mark.rows]
    metafunc.parametrize(names, values, ids=[row.label for row in mark.rows])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Run a test that is a check. Left to pytest, the report that it returns would be looked at by nobody."""
    from graphguard.checks.check import MARK, settled
    from graphguard.checks.row import fresh
    from graphguard.report.report import NotVerifiedError

    __tracebackhide__ = True
    mark = getattr(pyfuncitem.obj, MARK, None)
    if mark is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    arguments |= {name: fresh(arguments[name]) for name in mark.rows[0].values if name in arguments}
    returned, raised = None, None
    with opened() as scope:
        try:
            returned = pyfuncitem.obj(**arguments)
        except NotVerifiedError as error:
            raised = error
    report = settled(pyfuncitem.name, mark.expect, scope, returned, raised)
    record(f"graphguard.{pyfuncitem.name}", report.verdict)
    if report.verdict != mark.expect:
        pytest.fail(f"{report.gist}; the check {pyfuncitem.name} is expected to be {mark.expect}\n\n{report}", pytrace=False)
    return True
