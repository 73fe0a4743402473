"""For test suites: `assert_refines` in the place of `gg.verify`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphguard.api import verify
from graphguard.report import Report


def assert_refines(sequential: Callable[..., Any], distributed: Callable[..., Any], **options: Any) -> Report:
    """Fail unless the distributed function is verified to refine the sequential one. Takes the arguments of `gg.verify`."""
    __tracebackhide__ = True
    report = verify(sequential, distributed, **options)
    if isinstance(report, Report) and not report.verified:  # where checks are only collected, it is no report
        raise AssertionError(f"{_name(distributed)} is not verified to refine {_name(sequential)}\n\n{report}")
    return report


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
