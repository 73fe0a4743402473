"""The limits of all rooms, as users state them: by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any

from graphguard.engine import limits as engine
from graphguard.errors import UsageError
from graphguard.locate import limits as locate
from graphguard.oracle import limits as oracle

_STATED: ContextVar[Mapping[str, int] | None] = ContextVar("stated limits", default=None)


@dataclass(frozen=True)
class Limits:
    """By room."""

    engine: engine.Limits = field(default_factory=engine.Limits)
    oracle: oracle.Limits = field(default_factory=oracle.Limits)
    locate: locate.Limits = field(default_factory=locate.Limits)


@contextmanager
def stated(limits: Mapping[str, int]) -> Iterator[None]:
    """Inside, these limits count, whatever a check says."""
    token = _STATED.set(limits)
    try:
        yield
    finally:
        _STATED.reset(token)


def stated_now() -> dict[str, int]:
    """The limits that count here whatever a check says, for another process."""
    return dict(_STATED.get() or {})


def limits_of(limits: Any = None) -> Limits:
    """The limits of all rooms, with those that are given by name in place of what they are by default."""
    if limits is not None and not isinstance(limits, Mapping):
        raise UsageError(f"limits= is {type(limits).__name__}; write {{name: number}}")
    given = {**(limits or {}), **(_STATED.get() or {})}
    rooms = {room.name: room.default_factory for room in fields(Limits)}
    of_room = {room: {name: given.pop(name) for name in _names(make) if name in given} for room, make in rooms.items()}
    if given:
        known = [name for make in rooms.values() for name in _names(make)]
        raise UsageError(_unknown(str(next(iter(given))), known))
    for name, number in ((name, number) for each in of_room.values() for name, number in each.items()):
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise UsageError(f"the limit {name} is {number!r}; write a whole number from 0 on")
    return Limits(**{room: make(**of_room[room]) for room, make in rooms.items()})  # type: ignore[operator]


def parsed(text: str) -> dict[str, int]:
    """`factors=48,cells=128` as a dict."""
    found = {}
    for each in filter(None, text.split(",")):
        name, _, number = each.partition("=")
        if not number.strip().isdecimal():
            raise UsageError(f"--limits {each}: write NAME=N, with a whole number N")
        found[name.strip()] = int(number)
    limits_of(found)
    return found


def _names(limits: Any) -> list[str]:
    return [each.name for each in fields(limits)]


def _unknown(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    lead = f"did you mean {close[0]}? There are" if close else "there are"
    return f"there is no limit {name!r}; {lead}: {', '.join(sorted(known))}"
