"""How far a run of checks is: one line on a terminal that is written over. No thread draws it, as programs are forked."""

from __future__ import annotations

import shutil
from typing import TextIO

_WORDS = {"proof": "proving {}", "oracle": "executing {}"}
_BAR = 12
_SMALL_BAR = 8


class Progress:
    """`start`, `phase` and `done` are told; nothing is shown on what is no terminal."""

    def __init__(self, stream: TextIO, total: int):
        self.stream, self.total, self.finished = stream, total, 0
        self.shown = stream.isatty()
        self.running: dict[str, str] = {}

    def found(self, checks: int) -> None:
        """So many more checks are to be run."""
        self.total += checks

    def start(self, check: str) -> None:
        self.running[check] = f"capturing {check}"
        self._draw()

    def phase(self, check: str, title: str, done: int, total: int) -> None:
        """A phase by its name, with how much of it is done; or a program that was captured, with how many there are."""
        if title in _WORDS:
            bar = f" {_bar(done, total, _SMALL_BAR)} {100 * done // total} %" if total else ""
            self.running[check] = _WORDS[title].format(check) + bar
        else:
            self.running[check] = f"captured {title} ({done} of {total}) in {check}" if total else f"{title} {check}"
        self._draw()

    def done(self, check: str) -> None:
        self.running.pop(check, None)
        self.finished += 1
        self.clear()

    def clear(self) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=self.stream, flush=True)

    def _draw(self) -> None:
        if not self.shown:
            return
        running = "; ".join(self.running.values())
        text = f"[{_bar(self.finished, self.total, _BAR)}] {self.finished}/{self.total}  {running}"
        width = max(20, shutil.get_terminal_size((80, 24)).columns - 1)
        print(f"\r\x1b[K{text[:width]}", end="", file=self.stream, flush=True)


def _bar(done: int, total: int, length: int) -> str:
    full = length * done // max(total, 1)
    return "#" * full + "." * (length - full)
