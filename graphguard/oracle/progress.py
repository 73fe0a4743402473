"""How far an execution is, for who waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 1.0  # seconds before anything is said
_PAUSE = 0.1  # between two words
Tell = Callable[[int, int], None]  # how many operations of how many were run


class Watch:
    def __init__(self, tell: Tell, total: int):
        self.tell, self.total, self.done = tell, total, 0
        self.next = time.perf_counter() + PATIENCE

    def step(self) -> None:
        """An operation was run."""
        self.done += 1
        now = time.perf_counter()
        if now >= self.next:
            self.next = now + _PAUSE
            self.tell(min(self.done, self.total), self.total)
