"""What the benchmarks of whole models found: rows that are printed, and kept from run to run."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

import graphguard


@dataclass(frozen=True)
class Row:
    """One check, and what was measured. Seconds are by the clock, but for `processor`."""

    suite: str
    model: str
    layers: int
    tp: int
    dp: int
    pp: int
    microbatches: int
    fault: str | None
    verdict: str
    ranks: int
    classes: int | None
    operations: int  # of the sequential program and of each class of ranks
    capture: float
    proof: float
    total: float
    processor: float
    peak_bytes: int
    cp: int = 1

    @property
    def key(self) -> tuple[object, ...]:
        return self.suite, self.model, self.layers, self.tp, self.dp, self.pp, self.cp, self.microbatches, self.fault

    @property
    def mesh(self) -> str:
        sizes = {"TP": self.tp, "PP": self.pp, "DP": self.dp, "CP": self.cp}
        return " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"


def printed(rows: Sequence[Row]) -> Table:
    made = Table(title="training steps at published sizes; seconds by the clock", title_justify="left")
    right = {row.key: row for row in rows if row.fault is None}
    for column in ("model", "layers", "mesh", "ranks", "classes", "operations", "verdict", "capture", "proof", "all",
                   "processor", "µs per operation", "peak memory", "ratio"):  # fmt: skip
        made.add_column(column, justify="left" if column in ("model", "mesh", "verdict") else "right")
    for row in rows:
        without = right.get(replace(row, fault=None).key)
        ratio = f"{row.total / without.total:.1f}" if row.fault and without else ""
        made.add_row(
            row.model, str(row.layers), row.mesh, f"{row.ranks:,}", str(row.classes or "-"), f"{row.operations:,}", row.verdict,
            f"{row.capture:.1f}", f"{row.proof:.1f}", f"{row.total:.1f}", f"{row.processor:.1f}",
            f"{row.total / row.operations * 1e6:.0f}", f"{row.peak_bytes / 2**30:.1f} GiB", ratio,
        )  # fmt: skip
    return made


# ---------------------------------------------------------------------- results that are kept
def keep(file: Path, rows: Sequence[Row]) -> None:
    """Put rows among those of earlier runs, in place of the same ones."""
    known = {row.key: row for row in kept(file)} | {row.key: row for row in rows}
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "graphguard": graphguard.__version__}
    plain: dict[str, Any] = {"machine": machine, "rows": [asdict(row) for row in known.values()]}
    file.write_text(json.dumps(plain, indent=1) + "\n")


def kept(file: Path) -> list[Row]:
    return [Row(**row) for row in json.loads(file.read_text())["rows"]] if file.exists() else []
