"""docs/bugs.md, the page of faults: what GraphGuard says of each file in `examples/bugs`, and of each public report.

`python -m graphguard.gallery.bugs` runs all of them and writes the page.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence

from graphguard.checks.discovery import select
from graphguard.checks.runner import run
from graphguard.gallery.rows import GALLERY, GalleryRow, headline, issues, reporters, row_of, source_text
from graphguard.render.progress import Progress

PAGE = GALLERY.parent / "docs" / "bugs.md"
NOT_SHOWN = GALLERY / "bugs" / "NOT_SHOWN.md"
_PROCESSES = 2
_PLACES = {1: "1st", 2: "2nd", None: "no"}

HEAD = """# Bugs

Each file in `examples/bugs` is a fault in a program of our own that is as short as the fault allows, with its repair beside
it. Nearly all were made and reported in public; the numbers are those of the issues and pull requests. `graphguard demo` runs
them all. This page is written by `python -m graphguard.gallery.bugs`, and a test compares it.

"""
FAULTS = """
## Faults

The verdicts on both programs, the first finding on the faulty one, and whether the faulty line is the first or the second one
that its report names.

| bug | what was wrong | repair | fault | what the report says first, and where | faulty line named |
|---|---|---|---|---|---|
"""
REPORTS = """
## Reports

Each public report, with the program that has its fault.

| report | program | repair | fault | faulty line named |
|---|---|---|---|---|
"""
WITHOUT = """
## Reports without a program

"""


def bugs_page(done: Iterable[GalleryRow]) -> str:
    """The text of the page."""
    by_file: dict[str, list[GalleryRow]] = {}
    for row in done:
        by_file.setdefault(row.file, []).append(row)
    bugs = {file: rows for file, rows in by_file.items() if any(row.is_bug for row in rows)}
    faults = FAULTS + "".join(fault_line_of(file, rows) for file, rows in bugs.items())
    return HEAD + _score(bugs) + faults + REPORTS + "".join(_report_lines(bugs)) + WITHOUT + not_shown()


def _score(bugs: dict[str, list[GalleryRow]]) -> str:
    """How many faults are refuted, located and not decided, and the same of the public reports."""
    outcomes = {file: _outcome(rows) for file, rows in bugs.items()}
    by_report = _by_report(bugs)
    lines = [_counted("faults", outcomes.values())]
    if by_report:
        # A report that has several faults counts as its worst one.
        worst = [max((outcomes[file] for file in files), key=list(_OUTCOMES).index) for files in by_report.values()]
        lines.append(_counted("public reports", worst))
    repairs = [row for rows in bugs.values() for row in rows if not row.is_bug]
    proved = sum(row.verdict == "verified" for row in repairs)
    return (
        "| | caught, and the faulty line is named first | second | later or not | not decided |\n|---|---|---|---|---|\n"
        + "".join(lines)
        + f"\n{proved} of {len(repairs)} repairs are verified.{_open_ends(repairs)}\n"
    )


def _open_ends(repairs: Iterable[GalleryRow]) -> str:
    programs = [_program(row) for row in repairs if row.verdict != "verified"]
    return f" These are not decided yet, and say why: {', '.join(programs)}." if programs else ""


_OUTCOMES = ("1st", "2nd", "no", "not decided")


def _outcome(rows: Sequence[GalleryRow]) -> str:
    fault = _fault(rows)
    return _PLACES[fault.place] if fault.verdict == "refuted" else "not decided"


def _counted(title: str, outcomes: Iterable[str]) -> str:
    counts = Counter(outcomes)
    cells = (f"{sum(counts.values())} {title}", *(str(counts[outcome]) for outcome in _OUTCOMES))
    return f"| {' | '.join(cells)} |\n"


def _fault(rows: Sequence[GalleryRow]) -> GalleryRow:
    (fault,) = (row for row in rows if row.is_bug)
    return fault


def _repairs(rows: Sequence[GalleryRow]) -> str:
    return ", ".join(dict.fromkeys(row.verdict for row in rows if not row.is_bug))


def fault_line_of(file: str, rows: Sequence[GalleryRow]) -> str:
    """The line of the table of faults that the file has."""
    fault = _fault(rows)
    who, what = headline(file)
    source = source_text(*fault.named[0]) if fault.named else ""
    seen = f"{fault.found}<br>line {fault.named[0][1]}: `{source}`" if source else fault.found
    bug = f"{_linked(who)} ({_program(fault)})"
    return _line(bug, what, _repairs(rows), fault.verdict, seen, _PLACES[fault.place])


def _by_report(bugs: Iterable[str]) -> dict[tuple[str, int], list[str]]:
    """The files of each public report, by repository and number."""
    found: dict[tuple[str, int], list[str]] = {}
    for file in bugs:
        for issue in issues(reporters(file)):
            found.setdefault(issue, []).append(file)
    return dict(sorted(found.items(), key=lambda item: (item[0][0].lower(), item[0][1])))


def _report_lines(bugs: dict[str, list[GalleryRow]]) -> Iterable[str]:
    for (repository, number), files in _by_report(bugs).items():
        for file in files:
            fault = _fault(bugs[file])
            report = _link(repository, number, f"{repository} #{number}")
            yield _line(report, _program(fault), _repairs(bugs[file]), fault.verdict, _PLACES[fault.place])


def not_shown() -> str:
    """The table of reports that have no program, with links."""
    head, rule, *lines = NOT_SHOWN.read_text(encoding="utf-8").splitlines()
    listed = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return f"{head}\n{rule}\n" + "".join(_line(_linked(who), what, why) for who, what, why in listed)


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _linked(who: str) -> str:
    """Numbers of issues and pull requests as links."""
    parts = who.split(", ")
    return ", ".join(_link(*issue, part) for issue, part in zip(issues(who), parts, strict=True)) if issues(who) else who


def _program(row: GalleryRow) -> str:
    return f"[{row.stem}](../examples/bugs/{row.stem}.py)"


def _link(repository: str, number: int, text: str) -> str:
    return f"[{text}](https://github.com/{repository}/issues/{number})"


if __name__ == "__main__":
    os.chdir(GALLERY.parent)
    done = run(select([str(GALLERY / "bugs")]).targets, _PROCESSES, Progress(sys.stderr, 0), listing=False)
    PAGE.write_text(bugs_page(map(row_of, done)), encoding="utf-8")
