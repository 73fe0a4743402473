"""Code that is in no file: cells of notebooks, and what `python -c` was given."""

from __future__ import annotations

import re
import sys

COMMAND = "<string>"  # what Python calls the code of `python -c`, and other text that was compiled
_CELL = re.compile(r"<ipython-input-(\d+)-\w+>")


def cell(file: str) -> str | None:
    """`In [8]` for the code of a cell of a notebook that runs; None for files."""
    if found := _CELL.fullmatch(file):
        return f"In [{found[1]}]"
    running = sys.modules.get("IPython")
    shell = running.get_ipython() if running is not None else None
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})  # by the names of files that there are not
    return f"In [{numbers[file]}]" if file in numbers else None


def is_command() -> bool:
    """Whether the program is the text of `python -c`."""
    return sys.argv[:1] == ["-c"]


def command_lines() -> list[str]:
    """The text of `python -c`, by lines."""
    given = sys.orig_argv
    return given[given.index("-c") + 1].splitlines(keepends=True) if is_command() and "-c" in given[:-1] else []
