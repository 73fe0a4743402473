"""Which Python files of a folder are looked at for checks.

Importing a file may do anything, so only those are imported that can have checks: they mention graphguard, or import a file
that does, over any number of steps. What is left out is said.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_IMPORTS = re.compile(
    r"\bfrom\s+(?P<start>\.*[\w.]*)\s+import\s*(?:\((?P<many>[^)]*)\)|(?P<few>[^\n;#]*))"
    r"|\bimport\s+(?P<whole>[\w., \t]+)"
    r"|\b(?:import_module|__import__)\(\s*['\"](?P<called>\.*[\w.]+)"
)
_PROGRAMS = {"setup.py", "__main__.py"}  # made to be started, not imported


@dataclass(frozen=True)
class Skipped:
    """What of a folder is not looked at. `telling`: whether someone might have expected it to be."""

    path: str
    why: str
    telling: bool = True


def look_through(folder: str) -> tuple[list[str], list[Skipped]]:
    """The files that may have checks, those of the folder itself before those further down; and what was left out."""
    files: list[str] = []
    skipped: list[Skipped] = []
    known: dict[str, str] = {}
    for found in sorted(_walk(folder, frozenset()), key=lambda found: (found.path.count(os.sep), found.path)):
        path, first = found.path, known.setdefault(os.path.realpath(found.path), found.path)
        if found.why:
            skipped.append(found)
        elif first != path:
            skipped.append(Skipped(path, f"is the file {first}", telling=False))
        elif os.path.basename(path) in _PROGRAMS:
            skipped.append(Skipped(path, "is a program of its own"))
        elif not _uses_graphguard(path, folder):
            skipped.append(Skipped(path, "does not use graphguard", telling=os.path.basename(path) != "__init__.py"))
        else:
            files.append(path)
    return files, skipped


def _walk(folder: str, above: frozenset[str]) -> Iterator[Skipped]:
    """All Python files, and the folders that are passed by. Symbolic links are followed, but not in circles."""
    here = os.path.realpath(folder)
    if here in above:
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        yield Skipped(folder, f"cannot be read: {error.strerror}")
        return
    for entry in entries:
        if entry.is_dir():
            why = _passed_by(entry)
            if why:
                yield Skipped(_short(entry.path), why, telling=False)
            else:
                yield from _walk(entry.path, above | {here})
        elif entry.name.endswith(".py"):
            yield Skipped(_short(entry.path), "is hidden" if entry.name.startswith(".") else "")


def _short(path: str) -> str:
    return path.removeprefix(os.path.join(os.curdir, ""))


def _passed_by(entry: os.DirEntry[str]) -> str:
    if entry.name.startswith("."):
        return "is hidden"
    if os.path.exists(os.path.join(entry.path, "pyvenv.cfg")):
        return "is a virtual environment"
    return "has what Python compiled" if entry.name == "__pycache__" else ""


# ---------------------------------------------------------------------- imports
def _uses_graphguard(file: str, folder: str) -> bool:
    """Whether it mentions graphguard, or one of the files does that it imports. Libraries are not followed further."""
    waiting, seen = [file], {file}
    while waiting:
        current = waiting.pop()
        text = _text(current)
        if text is None or "graphguard" in text:  # what cannot be read is an error when it is imported
            return True
        if not _is_of_library(current):
            found = {path for name in _imports(text) for path in _files_of(name, os.path.dirname(current), folder)}
            waiting += found - seen
            seen |= found
    return False


@functools.cache
def _text(file: str) -> str | None:
    try:
        with open(file, encoding="utf-8", errors="surrogateescape") as opened:
            return opened.read()
    except OSError:
        return None


def _imports(text: str) -> set[str]:
    """The names of modules that are imported, relative ones with their dots; also what might be a module of a package."""
    names = set()
    for match in _IMPORTS.finditer(text):
        if match["start"]:
            start = match["start"]
            parts = re.findall(r"\w+", match["many"] or match["few"] or "")
            names |= {start, *(f"{start}{'' if start.endswith('.') else '.'}{part}" for part in parts)}
        else:
            names |= {part.split()[0] for part in (match["whole"] or match["called"]).split(",") if part.strip()}
    return names


def _files_of(name: str, beside: str, folder: str) -> Iterator[str]:
    """The files that importing the name runs: those of the packages, and that of the module."""
    bare = name.lstrip(".")
    dots, parts = len(name) - len(bare), [part for part in bare.split(".") if part]
    roots: Iterable[str] = dict.fromkeys([beside, folder, os.getcwd(), *filter(os.path.isdir, sys.path)])
    if dots:
        roots = [os.path.normpath(os.path.join(beside, *[os.pardir] * (dots - 1)))]
    elif parts and parts[0] in sys.stdlib_module_names:
        roots = [beside, folder]
    for root in roots:
        for length in range(len(parts) + 1):
            stem = os.path.join(root, *parts[:length])
            ends = [os.path.join(stem, "__init__.py"), *([f"{stem}.py"] if length else [])]
            yield from (path for path in ends[: 1 if length or dots else 0] + ends[1:] if os.path.isfile(path))


def _is_of_library(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file or file.startswith(os.path.dirname(os.__file__) + os.sep)
