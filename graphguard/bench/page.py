"""The page of the benchmarks, with its plots, from results that were kept (`graphguard bench end-to-end --write FILE.json`).

Plots and exponents are of processor time, which other work on the machine changes least.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from graphguard.bench.results import Row, kept
from graphguard.errors import UsageError

_PUBLISHED = """\
| published | what | seconds |
|---|---|---:|
| Entangle, ASPLOS '26, figures of its artifact | GPT, 8 layers, TP 8, forward, 16 cores | 174 |
| | Llama-3, 8 layers, TP 8, forward, 16 cores | 237 |
| TrainVerify, SOSP '25 | Llama-3 405B, 8,192 ranks, 32 cores | 28,800 (8 h) |
| | DeepSeek-V3 671B, 8,192 ranks, 32 cores | 32,400 (9 h) |
| Scalify | Llama-3.1 405B | "minutes" |
"""

_INTRODUCTION = """\
Whole training steps (loss and all gradients) of models at their published sizes, on one device and as Megatron splits them,
from both programs to the report. The programs are in `graphguard/bench/models`. Nothing is executed at these sizes: a fault is
located, and told as not proved; `graphguard bench faults` refutes narrow ones with numbers."""

_REMARKS = """\
An operation is a node of the sequential graph, or of the graph of a class of ranks. With a fault (the gradients of the norms in
the middle layer are not summed over TP), the ratio is to the program without."""


def write(file: Path) -> None:
    """The page beside a file of results, and a picture for each plot."""
    rows = kept(file)
    machine = json.loads(file.read_text())["machine"]
    pictures = [_plotted(file, rows, *plot) for plot in _PLOTS]
    file.with_suffix(".md").write_text(_page(file, rows, machine, [text for text in pictures if text]))


def _page(file: Path, rows: Sequence[Row], machine: dict[str, object], pictures: Sequence[str]) -> str:
    said = ", ".join(f"{name} {what}" for name, what in machine.items())
    parts = [
        "# Benchmarks",
        _INTRODUCTION,
        f"`graphguard bench end-to-end --write {file.name}` and `graphguard bench scaling --write {file.name}` write this page "
        f"({said}).\nSeconds are by the clock of a machine that others use too; processor seconds count all processes.",
        "## End to end",
        _table([row for row in rows if row.suite == "end-to-end"]),
        _REMARKS,
        "For comparison, what others published, on other machines:",
        _PUBLISHED,
        "## Scaling",
        *pictures,
        _table([row for row in rows if row.suite == "scaling"]),
    ]
    return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


def _table(rows: Sequence[Row]) -> str:
    without = {row.key: row for row in rows if row.fault is None}
    lines = [
        "| model | layers | mesh | ranks | classes | operations | fault | verdict | capture | proof | all | processor | peak |",
        "|---|---:|---|---:|---:|---:|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        right = without.get(replace(row, fault=None).key)
        ratio = f" ({row.processor / right.processor:.1f}×)" if row.fault and right else ""
        lines.append(
            f"| {row.model} | {row.layers} | {row.mesh} | {row.ranks:,} | {row.classes or ''} | {row.operations:,} "
            f"| {'one' if row.fault else ''} | {row.verdict} | {row.capture:.1f} s | {row.proof:.1f} s | {row.total:.1f} s "
            f"| {row.processor:.1f} s{ratio} | {row.peak_bytes / 2**30:.1f} GiB |"
        )
    return "\n".join(lines) if rows else ""


# ---------------------------------------------------------------------- plots
_Number = Callable[[Row], int]


def _splits(row: Row, *axes: str) -> bool:
    """Whether a row of the scaling suite splits along these axes, and no others."""
    sizes = {"tp": row.tp, "dp": row.dp, "pp": row.pp, "cp": row.cp}
    return row.suite == "scaling" and {axis for axis, size in sizes.items() if size > 1} == set(axes)


_PLOTS: tuple[tuple[str, str, Callable[[Row], bool], _Number], ...] = (
    ("tensor", "ranks of tensor parallelism", lambda row: _splits(row, "tp") and row.layers == 16, lambda row: row.tp),
    ("ranks", "ranks, TP 8 × PP 16 × DP", lambda row: _splits(row, "tp", "pp", "dp"), lambda row: row.ranks),
    ("experts", "ranks that share the experts", lambda row: _splits(row, "tp", "dp"), lambda row: row.dp),
    ("context", "ranks of context parallelism", lambda row: _splits(row, "tp", "cp"), lambda row: row.cp),
    ("layers", "layers", lambda row: _splits(row, "tp") and row.tp == 8, lambda row: row.layers),
    ("operations", "operations", lambda row: row.fault is None, lambda row: row.operations),
)


def exponent(numbers: Sequence[float], seconds: Sequence[float]) -> float:
    """Of the power of a number that fits the seconds best."""
    return float(np.polyfit(np.log(numbers), np.log(seconds), 1)[0])


def _plotted(file: Path, rows: Sequence[Row], name: str, title: str, wanted: Callable[[Row], bool], number: _Number) -> str:
    found = sorted((number(row), row.processor) for row in rows if row.fault is None and wanted(row))
    if len({each for each, _ in found}) < 2:
        return ""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("plots need matplotlib: pip install 'graphguard[docs]'") from None
    numbers, seconds = zip(*found, strict=True)
    power = exponent(numbers, seconds)
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.loglog(numbers, seconds, "o-" if name != "operations" else "o")
    axes.set_xlabel(title)
    axes.set_ylabel("processor seconds")
    axes.grid(True, which="major", alpha=0.3)
    picture = file.with_name(f"{file.stem}-{name}.svg")
    with rc_context({"svg.hashsalt": name}):  # the same picture each time
        figure.savefig(picture, metadata={"Date": None})
    return f"![processor seconds against {title}]({picture.name})\n\nAgainst {title}: time grows with the power {power:.2f}."
