"""`graphguard bench capture`: a 32-layer Llama of transformers, forward and backward, against make_fx in the same run."""

from __future__ import annotations

import pickle
import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from graphguard.capture import libraries
from graphguard.capture.isolate import run_isolated
from graphguard.capture.program import record_outputs
from graphguard.capture.recorder import Recorder
from graphguard.errors import UsageError
from graphguard.ir import Graph

LAYERS = 32
WIDTHS = {"7B": 4096, "a quarter as wide": 1024}


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
        "GraphGuard, first capture of a process": _measured(lambda: _record(WIDTHS["7B"], warm=False)),
        "GraphGuard, warm": _measured(lambda: _record(WIDTHS["7B"])),
        "GraphGuard, warm, a quarter as wide": _measured(lambda: _record(WIDTHS["a quarter as wide"])),
        "make_fx, warm": _measured(lambda: _make_fx(WIDTHS["7B"])),
    }
    table = Table(title=f"{LAYERS}-layer Llama of transformers {transformers.__version__}, 7B shape, forward + backward")
    for column in ("capture", "nodes", "seconds", "µs per node", "peak RSS"):
        table.add_column(column, justify="left" if column == "capture" else "right")
    for name, row in rows.items():
        table.add_row(name, str(row.nodes), f"{row.seconds:.2f}", f"{row.micros:.0f}", f"{row.peak_rss / 2**20:.0f} MB")
    Console().print(table)
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


def _model(hidden: int) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(num_hidden_layers=LAYERS, hidden_size=hidden, intermediate_size=hidden * 43 // 16, use_cache=False)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def _step(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mask is given: without it the library reads values to choose one, which make_fx cannot follow."""
    for parameter in model.parameters():
        parameter.grad = None
    loss: torch.Tensor = model(input_ids=ids, attention_mask=mask, labels=ids).loss
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _record(hidden: int, warm: bool = True) -> tuple[int, float]:
    model = _model(hidden)
    nodes, seconds = 0, 0.0
    for attempt in range(3 if warm else 1):
        recorder = Recorder(Graph("llama"))
        if attempt == 0:
            libraries.adjust(recorder, libraries.Holders())
        ids = recorder.tensor_input("ids", (2, 64), torch.int64)
        mask = recorder.tensor_input("mask", (2, 1, 64, 64), torch.float32)
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            recorder.rename_as_input(name, parameter.detach())
        begun = time.perf_counter()
        with recorder:
            loss = _step(model, ids, mask)
        seconds = time.perf_counter() - begun
        record_outputs(recorder, loss)
        nodes = len(recorder.graph.nodes)
    return nodes, seconds


def _make_fx(hidden: int) -> tuple[int, float]:
    from torch.fx.experimental.proxy_tensor import make_fx

    model = _model(hidden)
    ids = torch.zeros(2, 64, dtype=torch.int64, device="meta")
    mask = torch.zeros(2, 1, 64, 64, device="meta")
    nodes, seconds = 0, 0.0
    for _ in range(2):
        begun = time.perf_counter()
        graph: Any = make_fx(lambda ids, mask: _step(model, ids, mask))(ids, mask)
        seconds = time.perf_counter() - begun
        nodes = len(graph.graph.nodes)
    return nodes, seconds
