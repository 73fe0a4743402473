"""What came of each configuration: one JSON object per line, so that a sweep that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from graphguard.errors import UsageError


@dataclass(frozen=True)
class Row:
    """reason: the first finding, or what was raised, in one line; where: the first line that it names."""

    library: str
    torch: str
    graphguard: str
    name: str
    ranks: str
    verdict: str
    reason: str
    where: str
    seconds: float
    date: str

    @property
    def key(self) -> tuple[str, ...]:
        return self.library, self.torch, self.graphguard, self.name, self.ranks


class Ledger:
    """Rows in a file, or in memory only."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.rows = {row.key: row for row in _read(file)} if file is not None and file.exists() else {}

    def add(self, row: Row) -> None:
        self.rows[row.key] = row
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")


def _read(file: Path) -> Iterable[Row]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield Row(**json.loads(line))
        except (TypeError, ValueError):
            raise UsageError(f"{file}:{number} is no row of a sweep; name another file, or remove the line") from None


def today() -> str:
    return date.today().isoformat()
