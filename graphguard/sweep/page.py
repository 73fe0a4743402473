"""The rows of a sweep as a table, and as a page: grouped by verdict, and within it by reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from graphguard.sweep.ledger import Row

_ORDER = ("refuted", "raises", "unproven", "error", "verified")


def table(rows: Sequence[Row]) -> str:
    """For the terminal."""
    lines = [summary(rows)]
    for verdict, reason, members in groups(rows):
        lines.append(f"\n{verdict}: {reason}" if reason else f"\n{verdict}")
        lines += [
            f"  {row.name}, {row.ranks} ({row.seconds:.1f} s)" + (f"  {row.where}" if row.where else "") for row in members
        ]
    return "\n".join(lines) + "\n"


def page(rows: Sequence[Row]) -> str:
    """In Markdown, with versions and dates."""
    versions = sorted({f"{row.library}, torch {row.torch}, GraphGuard {row.graphguard}" for row in rows})
    dates = sorted({row.date for row in rows})
    lines = [
        f"## {'; '.join(versions)}",
        "",
        f"{summary(rows)} Run on {' to '.join(dict.fromkeys((dates[0], dates[-1])))}.",
        "",
    ]
    lines += [
        "`raises`: the sequential program runs, and the ranks raise. `error`: the configuration could not be built or run.",
        "",
    ]
    lines += ["| verdict | how many | why, and the first lines that are named | configurations |", "|---|--:|---|---|"]
    for verdict, reason, members in groups(rows):
        places = ", ".join(dict.fromkeys(f"`{row.where}`" for row in members if row.where))
        names = ("; " if verdict == "verified" else "<br>").join(f"{row.name} ({row.ranks})" for row in members)
        why = f"{_cell(reason)}<br>{places}" if places else _cell(reason)
        lines.append(f"| {verdict} | {len(members)} | {why} | {_cell(names)} |")
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[Row]) -> str:
    counts = Counter(row.verdict for row in rows)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _ORDER if counts[verdict])
    return f"{len(rows)} configurations: {said}."


def groups(rows: Iterable[Row]) -> Iterable[tuple[str, str, list[Row]]]:
    """Rows of one verdict and one reason."""
    ordered = sorted(rows, key=lambda row: (_ORDER.index(row.verdict), law(row.reason), row.name, row.ranks))
    for (verdict, reason), members in groupby(ordered, key=lambda row: (row.verdict, law(row.reason))):
        yield verdict, reason, list(members)


def law(reason: str) -> str:
    """A reason without the names of outputs: what rows have in common."""
    reason = re.sub(r"^\S+ = .*, but (.*)", r"\1", reason)
    reason = re.sub(r"^(grads\.\S+|loss|out|grad\S*): ", "", reason)
    return re.sub(r"grads\.\S+", "a gradient", reason)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<br>", "\0").replace("<", "&lt;").replace("\0", "<br>")
