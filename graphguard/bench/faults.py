"""`graphguard bench faults`: what it takes to refute a Llama with one fault, against what it takes to verify it without.

Widths are small, so that both programs can be executed. Each check runs in a process of its own, with one thread; seconds are
those of its processor, but for capture, which forks and is taken by the clock.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor.placement_types import Replicate

from graphguard.bench.llama import Llama
from graphguard.bench.wrong_llama import FAULTS, IN_A_LAYER, WrongLlama
from graphguard.capture.torch.front import TorchFrontEnd, functions
from graphguard.capture.torch.isolate import run_isolated
from graphguard.errors import InternalError
from graphguard.pipeline import decide

LAYERS, RANKS = (2, 8), (2, 4)
MOST = 3  # times as long as the right program, end to end
_SMALL = {"batch": 2, "sequence": 8, "hidden": 8, "heads": 16, "groups": 8, "head": 4, "inner": 16, "vocab": 40}


class Measurement(NamedTuple):
    """Seconds."""

    capture: float
    proof: float
    rest: float  # execution, and the search for the line

    @property
    def total(self) -> float:
        return sum(self)


def measure(llama: Llama, ranks: int) -> Measurement:
    """One check, which is verified, or refuted where it has a fault."""
    for _, result in run_isolated([lambda: pickle.dumps(_measured(llama, ranks))], workers=1):
        if isinstance(result, Exception):
            raise result
        return pickle.loads(result)  # type: ignore[no-any-return]
    raise AssertionError("one task gives one result")


def _measured(llama: Llama, ranks: int) -> Measurement:
    torch.set_num_threads(1)
    subject = functions(llama.sequential, llama.distributed, {"tp": ranks}, llama.inputs(), None)
    stated = {"loss": Replicate()} | {f"grads.{name}": placement for name, (_, placement) in llama.layout().items()}
    begun = time.perf_counter()
    problem = TorchFrontEnd(subject, stated).problem(frozenset())
    captured = time.perf_counter() - begun
    phases: dict[str, float] = {}  # when they began

    def noted(phase: str, done: int, total: int) -> None:
        phases.setdefault(phase, time.process_time())

    report = decide(problem, progress=noted)
    ended = time.process_time()
    expected = "refuted" if isinstance(llama, WrongLlama) else "verified"
    if report.verdict != expected:
        raise InternalError(f"the benchmark is {report.verdict}, not {expected}")
    return Measurement(captured, phases["oracle"] - phases["proof"], ended - phases["oracle"])


def programs(layers: int, splits_sequence: bool) -> Iterator[tuple[str, Llama]]:
    """The right one first; then each fault, those of a layer in the first, the middle and the last one."""
    sizes: dict[str, Any] = {"layers": layers, "splits_sequence": splits_sequence, **_SMALL}
    yield "none", Llama(**sizes)
    for fault in FAULTS:
        for at in sorted({0, layers // 2, layers - 1}) if fault in IN_A_LAYER else [0]:
            where = f", layer {at}" if fault in IN_A_LAYER else ""
            yield f"{fault}{where}", WrongLlama(**sizes, fault=fault, at=at)


def main(layers: Sequence[int] = LAYERS, ranks: Sequence[int] = RANKS) -> None:
    printed = Table(title="Llama, forward + backward: one fault against none; seconds", title_justify="left")
    for column in ("parallel", "layers", "ranks", "fault", "capture", "proof", "execution", "all", "ratio"):
        printed.add_column(column, justify="left" if column in ("parallel", "fault") else "right")
    worst = 0.0
    for splits_sequence in (False, True):
        for count in layers:
            for size in ranks:
                right: Measurement | None = None
                for fault, llama in programs(count, splits_sequence):
                    found = measure(llama, size)
                    right = right or found
                    ratio = found.total / right.total
                    worst = max(worst, ratio)
                    numbers = [f"{each:.2f}" for each in (*found, found.total, ratio)]
                    printed.add_row("tp + sp" if splits_sequence else "tp", str(count), str(size), fault, *numbers)
    Console(width=120).print(printed)
    print(f"A fault takes at most {worst:.1f} times as long as none, with capture (target: at most {MOST}).")
