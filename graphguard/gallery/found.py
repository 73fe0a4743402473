"""docs/found.md, the page of faults that were found in shipped libraries: what GraphGuard says, and what real ranks compute.

`python -m graphguard.gallery.found` runs every check of `examples/found`, and every file of it on real gloo ranks, and writes
the page.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from graphguard.checks.discovery import select
from graphguard.checks.runner import run
from graphguard.gallery.rows import GALLERY, GalleryRow, row_of, source_text
from graphguard.render.progress import Progress

FOLDER = GALLERY / "found"
PAGE = GALLERY.parent / "docs" / "found.md"
LOUD = FOLDER / "loud.py"
NOT_SHOWN = FOLDER / "NOT_SHOWN.md"

HEAD = """# Found in libraries

Faults that nobody planted: GraphGuard refuted a train step of a library as it is shipped, and real processes over gloo compute
the wrong numbers. Nothing raises. Each file in `examples/found` has a check of the unmodified library, which is `refuted`, a
check with a small change that is `verified`, and a run on real ranks. Nothing is here that real ranks did not show. What stands
for a GPU, or for Transformer Engine where megatron-core asks for it, is said in `examples/found/real_ranks.py` and
`examples/found/small_mla.py`.

To repeat one, with its library installed (`pip install -e '.[torch,libraries]'` in a clone):

<!-- not run: the table below has what it prints -->
```console
$ python examples/found/transformers_apertus.py              # real processes: one alone, and one for each rank
$ graphguard verify examples/found/transformers_apertus.py   # the proof: what is shipped, and what would be right
```

[Sweeps](sweeps.md) of libraries find such faults by themselves. This page is written by `python -m graphguard.gallery.found`.

"""
SILENT = """
## Silent

The first number is that of one process with the same weights and inputs, the others are those of the ranks. The last column
has the verdict on the change that repairs it.

| library | what is wrong | on real ranks | what GraphGuard says first, and where | public report | repaired |
|---|---|---|---|---|---|
"""
RAISES = """
## Loud

What is shipped and raises in a train step on real ranks, while one process runs (`python examples/found/loud.py`).

| what | what it raises |
|---|---|
"""
WITHOUT = """
## Not shown

What was looked for, and is not in the table above.

"""


def files(folder: Path = FOLDER) -> list[Path]:
    """Those that have checks; the others are what these share."""
    return [file for file in sorted(folder.glob("*.py")) if "\n@gg.check" in file.read_text(encoding="utf-8")]


def found_page(done: Iterable[GalleryRow], printed: dict[str, str], loud: Iterable[str]) -> str:
    """The text of the page. printed: by file, the first difference that its run on real ranks prints."""
    by_file: dict[str, list[GalleryRow]] = {}
    for row in done:
        by_file.setdefault(Path(row.file).stem, []).append(row)
    silent = [silent_line(stem, rows, printed[stem]) for stem, rows in by_file.items()]
    counts = f"{len(silent)} silent faults; {sum('| verified |' in line for line in silent)} repairs are verified.\n"
    raises = "".join(f"| {_cell(what)} | {_cell(error)} |\n" for what, _, error in (line.partition(" | ") for line in loud))
    return HEAD + counts + SILENT + "".join(silent) + RAISES + raises + WITHOUT + NOT_SHOWN.read_text(encoding="utf-8")


def silent_line(stem: str, rows: Sequence[GalleryRow], numbers: str) -> str:
    """The line of the table that a file has."""
    library, what, text = described(stem)
    (fault,) = (row for row in rows if row.is_bug)
    (repair,) = (row for row in rows if not row.is_bug)
    file, line = fault.named[0] if fault.named else ("", 0)
    where = f"<br>{Path(file).name}:{line}: `{source_text(file, line)}`" if file else ""
    reports = ", ".join(f"[{repo} #{number}](https://github.com/{repo}/issues/{number})" for repo, number in public(text))
    link = f"[{_cell(what)}](../examples/found/{stem}.py)"
    said = _cell(fault.found) + where.replace("|", "&#124;")
    return f"| {library} | {link} | {_cell(numbers)} | {said} | {reports} | {repair.verdict} |\n"


def described(stem: str) -> tuple[str, str, str]:
    """The library with its version, what is wrong, and the whole docstring."""
    text = ast.get_docstring(ast.parse((FOLDER / f"{stem}.py").read_text(encoding="utf-8"))) or ""
    match = re.match(r"(\S+ [\d.]+\d),? ?(.*?)\.?\n", f"{text}\n")
    assert match is not None, f"the first line of {stem}.py has no library with its version"
    return match[1], match[2].lstrip(": "), text


def public(text: str) -> list[tuple[str, str]]:
    """Repositories and numbers of the public reports that a docstring names."""
    repository, found = "", []
    for match in re.finditer(r"(?:([\w.-]+/[\w.-]+) )?#(\d+)", text):
        repository = match[1] or repository
        found.append((repository, match[2]))
    return found


def on_real_ranks(file: Path) -> list[str]:
    """What the file prints when it is run, line by line, without what libraries say while they are imported."""
    environment = {**os.environ, "PYTHONPATH": str(GALLERY.parent), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, env=environment, timeout=300, check=True)
    return [line.strip() for line in done.stdout.splitlines()]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


if __name__ == "__main__":
    os.chdir(GALLERY.parent)
    outcomes = run(select([str(file) for file in files()]).targets, 1, Progress(sys.stderr, 0), listing=False)
    numbers = {file.stem: on_real_ranks(file)[1] for file in files()}
    PAGE.write_text(found_page(map(row_of, outcomes), numbers, on_real_ranks(LOUD)), encoding="utf-8")
