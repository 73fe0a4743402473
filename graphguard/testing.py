"""For test suites: `assert_refines` in the place of `gg.verify`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from graphguard.api import verify
from graphguard.report.report import NotVerifiedError, Report


class NotRefinedError(NotVerifiedError, AssertionError):
    """Raised by `assert_refines`: a test fails by it, and a check has its report."""

    def __init__(self, what: str, report: Report):
        super().__init__(report)
        self.args = (f"{what}\n\n{report}",)
        self.what = what

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.report)


def assert_refines(
    sequential: Callable[..., Any],
    distributed: Callable[..., Any],
    *,
    record_property: Callable[[str, object], None] | None = None,
    **options: Any,
) -> Report:
    """Fail unless the distributed function is verified to refine the sequential one. Takes the arguments of `gg.verify`.

    The verdict becomes a property of the test, named `graphguard.<distributed function>`, which pytest writes to JUnit XML. The
    plugin that does so comes with the package; where plugins are not loaded, pass pytest's `record_property` fixture.
    """
    __tracebackhide__ = True
    report = verify(sequential, distributed, **options)
    if not isinstance(report, Report):  # where checks are only collected
        return report
    _record(record_property, f"graphguard.{_name(distributed)}", report.verdict)
    if not report.verified:
        what = f"{report.gist}; {_name(distributed)} is not verified to refine {_name(sequential)}"
        raise NotRefinedError(what, report)
    return report


def _record(record_property: Callable[[str, object], None] | None, name: str, verdict: str) -> None:
    plugin = sys.modules.get("graphguard.pytest_plugin")
    if record_property is not None:
        record_property(name, verdict)
    elif plugin is not None:
        plugin.record(name, verdict)


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
