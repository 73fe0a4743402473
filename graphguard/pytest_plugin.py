"""Loaded by pytest: remembers the running test, so that `assert_refines` can leave its verdict in the test's properties."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

_running: list[Any] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[Any]:
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.pop()


def record(name: str, value: str) -> None:
    """A property of the running test, as `record_property` makes it: JUnit XML has it."""
    if _running:
        _running[-1].user_properties.append((name, value))
