"""Pages whose code is run: what a reader would type, in order, in a folder of its own.

A block of Python with a title is a file; without one it is run, as one program with the others of its page. A `diff` with a
title changes the file. A console block has commands and what they print: `...` stands for any lines, and seconds are not
compared. A block after the comment `<!-- not run: why -->` is left alone.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+) -->\n)?```(?P<head>\w+[^\n]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
SHOWN_ONLY = ("make", "pip", "git")  # commands that a page may show, and that are not run


@dataclass(frozen=True)
class Block:
    language: str
    title: str | None
    code: str
    line: int
    skipped: bool


def blocks(text: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(text):
        title = re.search(r'title="([^"]+)"', match["head"])
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Block(match["head"].split()[0], title and title[1], match["code"], line, match["why"] is not None))
    return found


def run_page(page: Path, folder: Path) -> None:
    """Do what the page says, and compare what commands print with what it shows."""
    text = page.read_text()
    indented = re.search(r"^[ >]+```(python|console|diff)", text, re.MULTILINE)
    assert indented is None, f"{page}: a block of code that is indented would not be run"
    program = {"__name__": page.stem}
    for block in blocks(text):
        if block.skipped:
            continue
        if block.language == "python" and block.title:
            (folder / block.title).write_text(block.code)
        elif block.language == "python":
            file = folder / f"{page.stem}_{block.line}.py"
            file.write_text(block.code)
            exec(compile(block.code, str(file), "exec"), program)
        elif block.language == "diff" and block.title:
            change(folder / block.title, block.code)
        elif block.language == "console":
            for command, expected in commands(block.code):
                check_command(command, expected, folder, f"{page}:{block.line}")


def change(file: Path, diff: str) -> None:
    lines = [(line[:1], line[1:]) for line in diff.splitlines()]
    old = "".join(f"{line}\n" for mark, line in lines if mark != "+")
    new = "".join(f"{line}\n" for mark, line in lines if mark != "-")
    assert file.read_text().count(old) == 1, f"{file.name} does not have exactly one\n{old}"
    file.write_text(file.read_text().replace(old, new))


# ---------------------------------------------------------------------- commands
def commands(block: str) -> list[tuple[str, str]]:
    parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)
    assert parts[0] == "", f"a console block begins with a command: {block}"
    return list(zip(parts[1::2], parts[2::2], strict=True))


def check_command(command: str, expected: str, folder: Path, where: str) -> None:
    name, *args = shlex.split(command, comments=True)
    if name in SHOWN_ONLY:
        return
    assert name in ("graphguard", "pytest", "python"), f"{where}: {name} is not run"
    code, printed = apart(name, args, folder)
    assert code in (0, 1, 3), f"{where}: {command} exits with {code}\n{printed}"
    if expected:
        assert matches(printed, expected), f"{where}: {command} prints\n{printed}\nand the page has\n{expected}"


def apart(name: str, args: list[str], folder: Path) -> tuple[int, str]:
    """Run a command in a fork of this process, which has everything loaded; modules that it imports are gone with it."""
    import graphguard.api
    import graphguard.cli  # noqa: F401

    out = folder / ".out"
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.dup2(os.open(out, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), 1)
            os.chdir(folder)
            sys.stdout = os.fdopen(1, "w")
            sys.path.insert(0, str(folder))
            code = _run(name, args)
            sys.stdout.flush()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), out.read_text()


def _run(name: str, args: list[str]) -> int:
    if name == "pytest":
        import pytest

        return int(pytest.main(["-p", "no:cacheprovider", *args]))
    if name == "python":
        import runpy

        runpy.run_path(args[0], run_name="__main__")
        return 0
    from graphguard.cli import main

    try:
        main(args)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def matches(printed: str, expected: str) -> bool:
    """Whether it is what is shown, where a line `...` stands for any lines."""
    pieces = [re.escape(piece) for piece in re.split(r"^ *\.\.\.\n", timeless(expected), flags=re.MULTILINE)]
    return re.fullmatch("(?:.*\n)*".join(pieces), timeless(printed)) is not None


def timeless(text: str) -> str:
    return re.sub(r"\d+\.\d+ ?s\b", "N s", re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE))
