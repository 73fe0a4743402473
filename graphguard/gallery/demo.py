"""`graphguard demo`: the example gallery, verified, as one table."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from graphguard.checks.check import VERDICTS
from graphguard.checks.discovery import Target
from graphguard.checks.runner import run
from graphguard.errors import UsageError
from graphguard.gallery import found
from graphguard.gallery.rows import GALLERY, GalleryRow, row_of, same_file, source_text
from graphguard.render.progress import Progress

_PROCESSES, _INTERRUPTED = 2, 130
_STYLES = {"verified": "green", "refuted": "red", "unproven": "yellow", "error": "bold red"}
_CHECK, _VERDICT, _LINE, _SECONDS = 34, 9, 5, 7  # widths of columns; what was found has the rest
_FOUND_AT_LEAST, _FOUND_LINES = 30, 2
_TITLES = {"bugs": "Bugs", "found": "Found in libraries"}


def main() -> int:
    """Run the gallery and print its table. The exit code is that of `graphguard verify`."""
    if not GALLERY.is_dir():
        raise UsageError(f"the example gallery is not installed ({GALLERY}); run this from a clone of the repository")
    files = [*sorted(GALLERY.glob("*.py")), *sorted((GALLERY / "bugs").glob("*.py")), *_found()]
    count = sum(map(_checks_in, files))
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"Verifying the gallery: {count} checks")
    started = time.monotonic()
    done: list[GalleryRow] = []
    progress = Progress(sys.stderr, 0)
    try:
        for outcome in run([Target(str(file)) for file in files], _PROCESSES, progress, listing=False):
            progress.clear()
            done.append(row_of(outcome))
            _show(console, done)
    except KeyboardInterrupt:
        progress.clear()
        print(f"interrupted: {len(done)} of {count} checks were done", file=sys.stderr)
        return _INTERRUPTED
    console.print(_summary(done, time.monotonic() - started))
    return next((code for code in (2, 1, 3) if any(each.exit_code == code for each in done)), 0)


def _found() -> list[Path]:
    """Faults of libraries that are installed."""
    needed = {"megatron": "megatron.core", "torch": "torch", "transformers": "transformers"}
    return [file for file in found.files(GALLERY / "found") if _is_installed(needed[file.stem.split("_")[0]])]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False  # nor is the package that it is in


# ---------------------------------------------------------------------- the table
def _show(console: Console, done: Sequence[GalleryRow]) -> None:
    """The last row, below the head of its part where it is the first one."""
    titles = [_TITLES.get(Path(each.file).parent.name, "Strategies") for each in done[-2:]]
    if len(done) == 1 or titles[0] != titles[1]:
        console.print(_head(titles[-1], console.width))
    for line in _lines(done[-1], _label(done[-1]), console.width):
        console.print(line)


def _label(row: GalleryRow) -> str:
    return row.stem if _checks_in(Path(row.file)) == 1 else f"{row.stem}::{row.name}"


def _checks_in(file: Path) -> int:
    """How many there are, by the text: files of the gallery are plain."""
    return sum(line.startswith("@gg.check") for line in file.read_text(encoding="utf-8").splitlines())


def _head(title: str, width: int) -> Text:
    found = _found_width(width)
    cells = f"{title:{_CHECK}}  {'verdict':{_VERDICT}}  {'what was found':{found}}  {'line':>{_LINE}}  {'seconds':>{_SECONDS}}"
    return Text(f"\n{cells}\n{'─' * len(cells)}", style="bold")


def _found_width(width: int) -> int:
    return max(_FOUND_AT_LEAST, width - _CHECK - _VERDICT - _LINE - _SECONDS - 8)


def _lines(row: GalleryRow, label: str, width: int) -> list[Text]:
    """The row, with as many lines as what was found needs, and the line of the program where it was found."""
    found = _wrapped(row.found, _found_width(width), 1 if row.verdict == "verified" else _FOUND_LINES)
    verdict = row.verdict if row.as_expected else f"{row.verdict}!"
    line = Text.assemble(
        f"{_shortened(label, _CHECK):{_CHECK}}  ",
        (f"{verdict:{_VERDICT}}", _STYLES[row.verdict]),
        f"  {found[0]:{_found_width(width)}}  {_where(row):>{_LINE}}  {row.seconds:{_SECONDS}.2f}",
    )
    indent = " " * (_CHECK + _VERDICT + 4)
    source = source_text(*row.named[0]) if row.named else ""
    excerpt = [Text(indent + _shortened(f"> {source}", width - len(indent)), style="cyan")] if source else []
    return [line, *(Text(indent + text) for text in found[1:]), *excerpt]


def _where(row: GalleryRow) -> str:
    """The first line that is named; of the check's own file, as nearly always, it is just the number."""
    if not row.named:
        return ""
    file, line = row.named[0]
    return str(line) if same_file(file, row.file) else f"{os.path.basename(file)}:{line}"


def _wrapped(text: str, width: int, lines: int) -> list[str]:
    """The text in lines of that width, cut off where it needs too many."""
    wrapped: list[str] = [""]
    for word in text.split():
        if wrapped[-1] and len(wrapped[-1]) + 1 + len(word) > width:
            wrapped.append("")
        wrapped[-1] = f"{wrapped[-1]} {word}".strip()
    if len(wrapped) > lines:
        wrapped[lines - 1 :] = [" ".join(wrapped[lines - 1 :])]
    return [_shortened(line, width) for line in wrapped]


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _summary(done: Sequence[GalleryRow], seconds: float) -> Text:
    counts = Counter(row.verdict for row in done)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in (*VERDICTS, "error") if counts[verdict])
    unexpected = sum(not row.as_expected for row in done)
    bugs = [row for row in done if row.is_bug and Path(row.file).parent.name != "found"]  # whose lines are not in their files
    caught, located = sum(row.verdict == "refuted" for row in bugs), sum(row.place is not None for row in bugs)
    lines = [
        f"{said}; {'all as expected' if not unexpected else f'{unexpected} not as expected, marked !'} ({seconds:.0f} s)",
        f"{caught} of {len(bugs)} bugs refuted; the faulty line is the first or second one named in {located}",
        "One report in full: graphguard verify examples/bugs/NAME.py",
    ]
    return Text("\n" + "\n".join(lines if bugs else lines[:1]))
