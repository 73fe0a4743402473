"""`graphguard bench capture`: a 32-layer Llama of transformers, forward and backward, against make_fx in the same run.

"Warm" is the best of several captures in one process: the machine may be shared.
"""

from __future__ import annotations

import pickle
import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from graphguard.capture.torch import adapters
from graphguard.capture.torch.isolate import run_isolated
from graphguard.capture.torch.program import record_outputs
from graphguard.capture.torch.record.recorder import Recorder
from graphguard.errors import UsageError
from graphguard.graph.ir import Graph

LAYERS = 32
WIDTH = 4096


class Measurement(NamedTuple):
    nodes: int
    seconds: float
    peak_rss: int  # bytes

    @property
    def micros(self) -> float:
        return self.seconds / self.nodes * 1e6


def main() -> None:
    try:
        import transformers
    except ImportError:
        raise UsageError("this benchmark needs transformers: pip install 'graphguard[libraries]'") from None
    transformers.logging.set_verbosity_error()
    rows = {
        "GraphGuard, first capture of a process": _measured(lambda: _record(WIDTH, warm=False)),
        "GraphGuard, warm": _measured(lambda: _record(WIDTH)),
        "GraphGuard, warm, a quarter as wide": _measured(lambda: _record(WIDTH // 4)),
        "make_fx, warm": _measured(lambda: _make_fx(WIDTH)),
    }
    table = Table(title=f"{LAYERS}-layer Llama of transformers {transformers.__version__}, 7B shape, forward + backward")
    for column in ("capture", "nodes", "seconds", "µs per node", "peak RSS"):
        table.add_column(column, justify="left" if column == "capture" else "right")
    for name, row in rows.items():
        table.add_row(name, str(row.nodes), f"{row.seconds:.2f}", f"{row.micros:.0f}", f"{row.peak_rss / 2**20:.0f} MB")
    Console().print(table)
    print(f"a fork of this process, and its end: {_fork_seconds() * 1e3:.0f} ms")
    ours, theirs = rows["GraphGuard, warm"], rows["make_fx, warm"]
    print(f"make_fx takes {theirs.seconds / ours.seconds:.1f} times as long")


def _measured(task: Callable[[], tuple[int, float]]) -> Measurement:
    """Run in a process of its own, so that peaks of memory do not add up."""

    def isolated() -> bytes:
        nodes, seconds = task()
        return pickle.dumps(Measurement(nodes, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))

    for _, result in run_isolated([isolated], workers=1):
        if isinstance(result, Exception):
            raise result
        return pickle.loads(result)  # type: ignore[no-any-return]
    raise AssertionError("one task gives one result")


def _fork_seconds(count: int = 16) -> float:
    """What it costs to give each rank a process of its own."""
    begun = time.perf_counter()
    for _ in run_isolated([lambda: b"done"] * count, workers=1):
        pass
    return (time.perf_counter() - begun) / count


def _model(hidden: int) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(num_hidden_layers=LAYERS, hidden_size=hidden, intermediate_size=hidden * 43 // 16, use_cache=False)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _step(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mask is given: without it the library reads values to choose one, which make_fx cannot follow."""
    for parameter in model.parameters():
        parameter.grad = None
    loss: torch.Tensor = model(input_ids=ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    return loss.detach()


def _record(hidden: int, warm: bool = True) -> tuple[int, float]:
    model = _model(hidden)
    nodes, times = 0, []
    for attempt in range(5 if warm else 1):
        recorder = Recorder(Graph("llama"))
        if attempt == 0:
            adapters.adjust(recorder, adapters.Holders())
        ids = recorder.tensor_input("ids", (2, 64), torch.int64)
        mask = recorder.tensor_input("mask", (2, 1, 64, 64), torch.float32)
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            recorder.rename_as_input(name, parameter.detach())
        begun = time.perf_counter()
        with recorder:
            loss = _step(model, ids, mask)
        times.append(time.perf_counter() - begun)
        record_outputs(recorder, loss)
        nodes = len(recorder.graph.nodes)
    return nodes, min(times)


def _make_fx(hidden: int) -> tuple[int, float]:
    from torch.fx.experimental.proxy_tensor import make_fx

    model = _model(hidden)
    ids = torch.zeros(2, 64, dtype=torch.int64, device="meta")
    mask = torch.zeros(2, 1, 64, 64, device="meta")
    nodes, times = 0, []
    for _ in range(3):
        begun = time.perf_counter()
        graph: Any = make_fx(lambda ids, mask: _step(model, ids, mask))(ids, mask)
        times.append(time.perf_counter() - begun)
        nodes = len(graph.graph.nodes)
    return nodes, min(times)
