"""`graphguard bench end-to-end`: whole training steps of models at their published sizes, from both programs to the report.

Each check runs in a process of its own, nothing of it is executed at these sizes. `graphguard bench scaling` is the same with
more ranks, more layers and other axes.
"""

from __future__ import annotations

import os
import pickle
import resource
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from graphguard.bench.faulty import FAULTS, Faulty
from graphguard.bench.models.megatron import Megatron
from graphguard.bench.models.of_transformers import TransformersLlama
from graphguard.bench.models.sizes import MODELS
from graphguard.bench.page import write as write_page
from graphguard.bench.results import Row, keep, printed
from graphguard.capture.torch.isolate import run_isolated
from graphguard.errors import InternalError
from graphguard.pipeline import decide

# ---------------------------------------------------------------------- what is measured
Model = Megatron | TransformersLlama


def end_to_end() -> Iterator[tuple[str, Model]]:
    yield "Llama-3 8B of transformers", TransformersLlama(MODELS["Llama-3 8B"], 8)
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


def scaling() -> Iterator[tuple[str, Model]]:
    """More ranks of one axis, with all else as it was; then more layers."""
    name = "Llama-3 405B"
    llama = replace(MODELS[name], layers=16, groups=128)  # a key for each head, so that 64 ranks can split them
    for tp in (2, 4, 8, 16, 32, 64):
        yield name, Megatron(llama, tp)
    for dp in (2, 8, 32, 128):
        yield name, Megatron(replace(llama, groups=8, layers=32), 8, dp, 16, 16)
    experts = "DeepSeek-V3-like 671B"
    for dp in (8, 16, 32, 64):
        yield experts, Megatron(replace(MODELS[experts], layers=5), 2, dp)
    for cp in (2, 4, 8, 16):
        yield name, Megatron(replace(llama, groups=8), 8, cp=cp)
    for layers in (8, 16, 32, 64, 126):
        yield name, Megatron(replace(MODELS[name], layers=layers), 8)


SUITES = {"end-to-end": end_to_end, "scaling": scaling}


# ---------------------------------------------------------------------- a measurement
def measured(suite: str, name: str, model: Model) -> Row:
    for _, result in run_isolated([lambda: pickle.dumps(_measured(suite, name, model))], workers=1):
        if isinstance(result, Exception):
            raise result
        return pickle.loads(result)  # type: ignore[no-any-return]
    raise AssertionError("one task gives one result")


def _measured(suite: str, name: str, model: Model) -> Row:
    begun, fault = time.perf_counter(), model.fault if isinstance(model, Faulty) else None
    problem = model.front().problem(frozenset())
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
        seconds["capture"], seconds["proof"], total, sum(os.times()[:4]), peak * 1024, model.cp,
    )  # fmt: skip


def main(suite: str = "end-to-end", only: str = "", write: Path | None = None, faults: bool = True) -> None:
    rows: list[Row] = []
    progress = Console(stderr=True)
    for name, model in SUITES[suite]():
        title = f"{name} {model.mesh} {model.sizes.layers} layers"
        if only not in title:
            continue
        wrong = [Faulty(**{**vars(model), "fault": FAULTS[0]})] if faults and isinstance(model, Megatron) else []
        for each in (model, *wrong) if suite == "end-to-end" else (model,):
            rows.append(measured(suite, name, each))
            progress.print(f"{title}: {rows[-1].verdict} in {rows[-1].total:.0f} s", highlight=False)
            if write is not None:
                keep(write, rows[-1:])
    Console(width=150).print(printed(rows))
    if write is not None:
        write_page(write)
