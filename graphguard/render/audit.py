"""`graphguard lemmas audit`: which lemmas are meant, and what was found of them, as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphguard.oracle.audit import Line

HEAD = ("operator", "cases", "wrong", "could be weaker", "seconds", "")


def audited(names: Sequence[str], examples: int, seed: int, progress: Callable[[int, int], None] | None = None) -> list[Line]:
    """Lines of the lemmas that names mean: all of them if there are no names, those of the user's if there are files alone."""
    from graphguard.lemmas.user import registered_by
    from graphguard.oracle.audit import audit_lemmas, audit_rows, rows_named

    files = [name for name in names if name.endswith(".py")]
    operators = [name for name in names if name not in files]
    own = {name: lemma for lemma in registered_by(files) for name in (lemma.name, lemma.operator)}
    mine = [own[name] for name in operators if name in own] if operators else list(dict.fromkeys(own.values()))
    rows = None if not names else rows_named(name for name in operators if name not in own)
    built_in = [] if rows == [] else audit_rows(rows, examples=examples, seed=seed, progress=progress)
    return [*built_in, *audit_lemmas(mine, examples=max(examples, 1) * 8, seed=seed)]


def lines_of(found: Sequence[Line]) -> Iterator[str]:
    rows = [
        (line.operator, str(line.cases), str(len(line.wrong)), str(len(line.weaker)), f"{line.seconds:.2f}", line.note)
        for line in found
    ]
    widths = [max(len(row[column]) for row in [HEAD, *rows]) for column in range(len(HEAD))]
    for row in [HEAD, *rows]:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:5], widths[1:5], strict=True)),
            row[5],
        ]
        yield "  ".join(cells).rstrip()
    for line in found:
        yield from (f"wrong: {line.operator}: {text}" for text in line.wrong[:2])
        yield from (f"could be weaker: {line.operator}: {text}" for text in line.weaker[:1])
    wrong, weaker, without = (sum(map(bool, each)) for each in zip(*map(_marks, found), strict=True)) if found else (0, 0, 0)
    yield (
        f"{len(found)} lemmas, {sum(line.cases for line in found)} cases: {wrong} wrong, {weaker} could be weaker, "
        f"{without} without a sample"
    )


def _marks(line: Line) -> tuple[bool, bool, bool]:
    return bool(line.wrong), bool(line.weaker), line.note == "no sample"
