"""What comes of the example gallery: one row per check. The page of bugs is made of them.

In a file of `examples`, a comment `# fault: NAME` stands above the line that is wrong in the check of that name.

A file below `examples/bugs` has two programs, the faulty one and its repair. Its constant BUG_LINE is the text of the
faulty line. The first line of its docstring says who reported the bug and what was wrong; a last paragraph `Also: ...` names
further reports of the same fault.
"""

from __future__ import annotations

import ast
import os
import re
from dataclasses import dataclass
from pathlib import Path

from graphguard.checks.check import Outcome
from graphguard.report.report import Report

GALLERY = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class GalleryRow:
    """The outcome of one check.

    found: the first finding, or how the first output is rebuilt, in one line. Lines of the check's own file are numbers only.
    named: the lines that the findings name, the most telling first.
    """

    file: str
    name: str
    expect: str
    verdict: str
    found: str
    named: tuple[tuple[str, int], ...]
    seconds: float
    exit_code: int

    @property
    def stem(self) -> str:
        return Path(self.file).stem

    @property
    def as_expected(self) -> bool:
        return self.exit_code == 0

    @property
    def is_bug(self) -> bool:
        """Whether the program is wrong, also where no verdict says so yet."""
        return self.expect == "refuted" or self.name == "buggy"

    @property
    def place(self) -> int | None:
        """Which of the named lines is the faulty one, from 1; None if it is none of the first two."""
        at = fault_lines(self.file, self.name)
        places = [number for number, (file, line) in enumerate(self.named[:2], 1) if same_file(file, self.file) and line in at]
        return places[0] if places else None


def row_of(outcome: Outcome) -> GalleryRow:
    check, report = outcome.check, outcome.report
    if report is None:
        return GalleryRow(check.file, check.name, check.expect, "error", str(outcome.error), (), 0.0, outcome.exit_code)
    seconds = sum(value or 0.0 for value in report.stats.get("seconds", {}).values())
    exit_code = outcome.exit_code
    return GalleryRow(
        check.file, check.name, check.expect, report.verdict, _found(outcome), named_lines(report), seconds, exit_code
    )


def _found(outcome: Outcome) -> str:
    report = outcome.report
    assert report is not None
    if report.findings:
        finding = report.findings[0]
        own = rf"[^\s()]*\b{re.escape(os.path.basename(outcome.check.file))}:(\d+)"
        return " ".join(re.sub(own, r"line \1", f"{finding.code} {finding.message}").split())
    relations = [" ".join(text.split()) for text in str(report.relation).splitlines()]
    return relations[0] if len(relations) == 1 else f"{relations[0]}; and {len(relations) - 1} more" if relations else ""


def named_lines(report: Report) -> tuple[tuple[str, int], ...]:
    """The lines of the ranks' programs at which the findings are, the most telling first."""
    return tuple(dict.fromkeys(line.place for finding in report.findings for line in finding.lines))


def source_text(file: str, line: int) -> str:
    """That line of the file, or nothing where there is none."""
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()[line - 1].strip()
    except (OSError, IndexError):
        return ""


def same_file(one: str, other: str) -> bool:
    return os.path.basename(one) == os.path.basename(other)


def fault_line(file: str) -> int | None:
    """The number of the line that BUG_LINE has the text of."""
    text = Path(file).read_text(encoding="utf-8")
    faults = [
        statement.value.value
        for statement in ast.parse(text).body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Constant)
        and any(isinstance(target, ast.Name) and target.id == "BUG_LINE" for target in statement.targets)
    ]
    lines = [number for number, line in enumerate(text.splitlines(), 1) if faults and line.strip() == faults[0]]
    return lines[0] if len(lines) == 1 else None


def fault_lines(file: str, check: str) -> list[int]:
    """The lines below a mark, `# fault: NAME`, with the name of that check; or the one that BUG_LINE has the text of."""
    marks = (re.match(r" *# fault: ([\w, ]+)$", line) for line in Path(file).read_text(encoding="utf-8").splitlines())
    marked = [number + 1 for number, mark in enumerate(marks, 1) if mark is not None and check in mark[1].split(", ")]
    line = fault_line(file)
    return marked or ([line] if line is not None else [])


def headline(file: str) -> tuple[str, str]:
    """Who reported the bug, and what was wrong, from the first line of the docstring."""
    who, _, what = _docstring(file).partition("\n")[0].partition(": ")
    return who, what.rstrip(".")


def reporters(file: str) -> str:
    """All who reported the bug, those of the same fault included: `owner/name #1, #2, other/one #3`."""
    *_, last = _docstring(file).split("\n\n")
    also = " ".join(last.split()).removeprefix("Also: ").rstrip(".") if last.startswith("Also: ") else ""
    return ", ".join(filter(None, [headline(file)[0], also]))


def issues(who: str) -> list[tuple[str, int]]:
    """Repository and number of each issue or pull request; nothing where the text names other sources."""
    repository, found = "", []
    for part in who.split(", "):
        match = re.fullmatch(r"(?:([\w.-]+/[\w.-]+) )?#(\d+)", part)
        if match is None:
            return []
        repository = match[1] or repository
        found.append((repository, int(match[2])))
    return found


def _docstring(file: str) -> str:
    return ast.get_docstring(ast.parse(Path(file).read_text(encoding="utf-8"))) or ""
