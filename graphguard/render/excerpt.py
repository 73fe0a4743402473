"""A few lines of a source file around the one that matters."""

from __future__ import annotations

import linecache
from dataclasses import dataclass

from graphguard.graph.cells import COMMAND, command_lines
from graphguard.graph.ir import Source

AROUND = 2
_OPENERS = ("def ", "class ", "async def ", "@")


@dataclass(frozen=True)
class SourceLine:
    number: int
    text: str
    marked: bool


def excerpt(source: Source, around: int = AROUND) -> list[SourceLine]:
    """Lines of the same function where that can be seen. Empty if the file cannot be read, or has no such line."""
    linecache.checkcache(source.file)
    given = command_lines() if source.file == COMMAND else linecache.getlines(source.file)
    lines = [line.rstrip().expandtabs(4) for line in given]
    if not 0 < source.line <= len(lines):
        return []
    first, last = max(1, source.line - around), min(len(lines), source.line + around)
    indent = _indent(lines[source.line - 1])
    for number in range(first, source.line):
        if _opens_another(lines[number - 1], indent):
            first = number
    for number in range(last, source.line, -1):
        if _opens_another(lines[number - 1], indent) or _is_outside(lines[number - 1], indent):
            last = number - 1
    while not lines[first - 1] and first < source.line:
        first += 1
    while not lines[last - 1] and last > source.line:
        last -= 1
    chosen = lines[first - 1 : last]
    common = min((_indent(text) for text in chosen if text), default=0)
    return [SourceLine(first + n, text[common:], first + n == source.line) for n, text in enumerate(chosen)]


def _opens_another(text: str, indent: int) -> bool:
    """Whether a function or a class begins there that the line in question is not part of, or part of its body only."""
    return text.lstrip().startswith(_OPENERS) and (_indent(text) < indent or _indent(text) == 0)


def _is_outside(text: str, indent: int) -> bool:
    """Whether a line is at the top of the file, and the line in question is not."""
    return bool(text) and _indent(text) == 0 < indent and text[0] not in ")]}"


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())
