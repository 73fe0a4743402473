"""Limits of work: how much is tried before a question is left open, and which limits were reached.

Each room has a `Limits` of its own. A limit that is reached only ever leads to less being said, and the report then names it.
A number that chooses between two ways to the same answer, or bounds what is printed or kept, is no limit: it stands where it
is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any


def limit(default: int, beyond: str, *, proves: bool = True) -> Any:
    """A field of a `Limits`. beyond: what is left open, with {} for the number. proves: whether a verdict may depend on it;
    else it bounds what is told beside it."""
    return field(default=default, metadata={"beyond": beyond, "proves": proves})


@dataclass(frozen=True)
class Stop:
    """A limit that was reached."""

    limit: str
    allowed: int
    beyond: str
    proves: bool = True  # whether a verdict may depend on it
    needed: int | None = None  # None where that is not known
    outputs: tuple[str, ...] = ()  # that it may have left open; none if that is not known

    @property
    def text(self) -> str:
        """`products of more than 24 factors`."""
        return self.beyond.format(self.allowed)

    @property
    def retry(self) -> str:
        """The option that allows for more: twice as much, until it is enough."""
        more = 2 * max(1, self.allowed)
        while self.needed is not None and more < self.needed:
            more *= 2
        return f"--limits {self.limit}={more}"

    def __str__(self) -> str:
        return f"{self.text}; `{self.retry}`"

    def to_plain(self) -> dict[str, Any]:
        return {
            "limit": self.limit,
            "allowed": self.allowed,
            "needed": self.needed,
            "text": self.text,
            "retry": self.retry,
            "outputs": list(self.outputs),
        }


class Stops:
    """The limits of a room, and which of them were reached."""

    def __init__(self, limits: Any):
        self.limits = limits
        self._about = {each.name: each.metadata for each in fields(limits)}
        self._needed: dict[str, int | None] = {}

    def over(self, limit: str, needed: int) -> bool:
        """Whether more is needed than a limit allows."""
        if needed <= getattr(self.limits, limit):
            return False
        self.note(limit, needed)
        return True

    def note(self, limit: str, needed: int | None = None) -> None:
        """A limit was reached; needed: how much it would have to be, where that is known."""
        self._needed[limit] = most(self._needed.get(limit), needed)

    def note_all(self, others: Stops) -> None:
        for each in others.reached():
            self.note(each.limit, each.needed)

    def reached(self) -> tuple[Stop, ...]:
        return tuple(self.stop(limit, needed) for limit, needed in self._needed.items())

    def stop(self, limit: str, needed: int | None, outputs: Iterable[str] = ()) -> Stop:
        return Stop(limit, getattr(self.limits, limit), **self._about[limit], needed=needed, outputs=tuple(outputs))


def most(one: int | None, other: int | None) -> int | None:
    """The larger of what is known."""
    return max((each for each in (one, other) if each is not None), default=None)
