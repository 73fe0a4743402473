"""`graphguard bench end-to-end`: whole training steps of models at their published sizes, from both programs to the report.

Each check runs in a process of its own, nothing of it is executed at these sizes. `graphguard bench scaling` is the same with
more ranks, more layers and other axes.
"""

from __future__ import annotations

import json
import os
import pickle
import platform
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import graphguard
from graphguard.bench.faulty import FAULTS, Faulty
from graphguard.bench.models.megatron import Megatron
from graphguard.bench.models.sizes import MODELS
from graphguard.capture.torch.front import TorchFrontEnd, functions
from graphguard.capture.torch.isolate import run_isolated
from graphguard.errors import InternalError
from graphguard.pipeline import decide


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

    @property
    def key(self) -> tuple[object, ...]:
        return self.suite, self.model, self.layers, self.tp, self.dp, self.pp, self.microbatches, self.fault

    @property
    def mesh(self) -> str:
        sizes = {"TP": self.tp, "PP": self.pp, "DP": self.dp}
        return " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"


# ---------------------------------------------------------------------- what is measured
def end_to_end() -> Iterator[tuple[str, Megatron]]:
    for name, tp, pp, dp, microbatches in (
        ("Llama-3 8B", 8, 1, 1, 1),
        ("Llama-3 70B", 8, 4, 2, 8),
        ("Qwen2-72B", 8, 4, 2, 8),
        ("GPT-3 175B", 8, 8, 2, 8),
        ("Llama-3 405B", 8, 1, 2, 1),
        ("Llama-3 405B", 8, 16, 8, 16),
        ("Llama-3 405B", 8, 16, 128, 16),
        ("DeepSeek-V3-like 671B", 8, 16, 16, 16),
    ):
        yield name, Megatron(MODELS[name], tp, dp, pp, microbatches)


def scaling() -> Iterator[tuple[str, Megatron]]:
    """More ranks of one axis, with all else as it was; then more layers."""
    name = "Llama-3 405B"
    llama = replace(MODELS[name], layers=16, groups=128)  # a key for each head, so that 64 ranks can split them
    for tp in (2, 4, 8, 16, 32, 64):
        yield name, Megatron(llama, tp)
    for dp in (2, 8, 32, 128):
        yield name, Megatron(replace(llama, groups=8, layers=32), 8, dp, 16, 16)
    experts = "DeepSeek-V3-like 671B"
    for dp in (8, 16, 32, 64):
        yield experts, Megatron(replace(MODELS[experts], layers=4), 2, dp)
    for layers in (8, 16, 32, 64, 126):
        yield name, Megatron(replace(MODELS[name], layers=layers), 8)


SUITES = {"end-to-end": end_to_end, "scaling": scaling}


# ---------------------------------------------------------------------- a measurement
def measured(suite: str, name: str, model: Megatron) -> Row:
    for _, result in run_isolated([lambda: pickle.dumps(_measured(suite, name, model))], workers=1):
        if isinstance(result, Exception):
            raise result
        return pickle.loads(result)  # type: ignore[no-any-return]
    raise AssertionError("one task gives one result")


def _measured(suite: str, name: str, model: Megatron) -> Row:
    begun, fault = time.perf_counter(), model.fault if isinstance(model, Faulty) else None
    subject = functions(model.sequential, model.distributed, model.mesh, model.inputs(), model.local_inputs)
    problem = TorchFrontEnd(subject, model.expected()).problem(frozenset())
    report = decide(problem)
    total = time.perf_counter() - begun
    if report.verified != (fault is None):
        raise InternalError(f"the benchmark {name} on {model.mesh} is {report.verdict}")
    captured, seconds = problem.captured, report.stats["seconds"]
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return Row(
        suite, name, model.sizes.layers, model.tp, model.dp, model.pp, model.microbatches, fault,
        report.verdict, problem.mesh.size, captured.classes,
        len(captured.sequential.nodes) + sum(len(each.graph.nodes) for each in captured.world().classes),
        seconds["capture"], seconds["proof"], total, sum(os.times()[:4]), peak * 1024,
    )  # fmt: skip


def main(suite: str = "end-to-end", only: str = "", write: Path | None = None, faults: bool = True) -> None:
    rows: list[Row] = []
    for name, model in SUITES[suite]():
        title = f"{name} {model.mesh} {model.sizes.layers} layers"
        if only not in title:
            continue
        wrong = Faulty(**{**vars(model), "fault": FAULTS[0]})
        for each in (model, wrong) if faults and suite == "end-to-end" else (model,):
            rows.append(measured(suite, name, each))
            if write is not None:
                keep(write, rows[-1:])
    Console(width=150).print(printed(rows))
    if write is not None:
        from graphguard.bench.page import write as write_page

        write_page(write)


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
