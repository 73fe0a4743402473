"""`graphguard bench engine`: a Llama of 126 layers, forward and backward, and its ranks under tensor + sequence parallelism.

Both graphs are interpreted and every output is related; capture is not counted. An operation is a node of the sequential graph
or of the graph of a class of ranks: they are interpreted at once, so their nodes are counted once.
"""

from __future__ import annotations

import gc
import pickle
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table as Printed

from graphguard.bench.llama import Llama
from graphguard.capture.torch.isolate import run_isolated
from graphguard.capture.torch.program import FunctionProgram
from graphguard.capture.torch.session import capture
from graphguard.capture.torch.subject import Subject
from graphguard.engine.interpret import Interpretation, Interpreter
from graphguard.engine.prove import _Prover, without_collection
from graphguard.engine.store.table import Table
from graphguard.errors import InternalError
from graphguard.graph.ir import Graph, Mesh
from graphguard.graph.placement import REPLICATE, Shard
from graphguard.graph.world import World
from graphguard.lemmas.known import all_lemmas
from graphguard.relation.expectation import Expectation

LAYERS = (16, 63, 126)
LANES = (8, 1024)
REPEATS = 3
MOST_MICROS, MOST_GROWTH = 100, 1.5  # per operation at the fewest lanes; of the time from the fewest lanes to the most


class Case(NamedTuple):
    """What is proved."""

    sequential: Graph
    world: World
    expected: dict[str, Expectation]
    ranges: dict[str, tuple[int, int]]

    @property
    def operations(self) -> int:
        return len(self.sequential.nodes) + sum(len(each.graph.nodes) for each in self.world.classes)


def case_of(llama: Llama, ranks: int) -> Case:
    programs = FunctionProgram(llama.sequential, "sequential"), FunctionProgram(llama.distributed, "distributed")
    found = capture(Subject(*programs, Mesh.of({"tp": ranks}), llama.inputs()))
    expected = {f"grads.{name}": _expectation(placement) for name, (_, placement) in llama.layout().items()}
    expected["loss"] = Expectation(str(REPLICATE), (REPLICATE,))
    return Case(found.sequential, found.world(), expected, dict.fromkeys(("tokens", "target"), (0, llama.vocab)))


def _expectation(placement: Any) -> Expectation:
    placed = Shard(placement.dim) if placement.is_shard() else REPLICATE
    return Expectation(str(placed), (placed,))


# ---------------------------------------------------------------------- the measurement
class Measurement(NamedTuple):
    sequential: float  # seconds
    ranks: float
    relating: float
    peak_rss: int  # bytes
    added_rss: int

    @property
    def interpreting(self) -> float:
        return self.sequential + self.ranks


def measure(case: Case) -> Measurement:
    gc.collect()
    with without_collection():
        return _measured(case, _peak_rss())


def _measured(case: Case, before: int) -> Measurement:
    begun = time.perf_counter()
    table = Table()
    interpreter = Interpreter(table, all_lemmas())
    inputs = {name: interpreter.input(name, value.shape) for name, value in case.sequential.inputs.items()}
    for name, (low, high) in case.ranges.items():
        for term in inputs[name].terms:
            table.facts.declare(term.factors[0].atom, low, high)
    sequential = interpreter.run_sequential(case.sequential, inputs)
    turned = time.perf_counter()
    table.recording = False
    environments = interpreter.run_classes(case.world, inputs)
    interpreted = time.perf_counter()
    streams = list(zip(case.world.classes, environments, strict=True))
    found = Interpretation(table, interpreter.lemmas, sequential, streams, interpreter.opaque, interpreter.fallbacks)
    proof = _Prover(found, case.sequential, case.world, case.expected).run()
    ended = time.perf_counter()
    if not proof.proved:
        raise InternalError(f"the benchmark is not proved: {proof.findings[0].message}")
    peak = _peak_rss()
    return Measurement(turned - begun, interpreted - turned, ended - interpreted, peak, peak - before)


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _isolated(task: Callable[[], object]) -> Any:
    """Run in a process of its own, so that peaks of memory do not add up."""
    for _, result in run_isolated([lambda: pickle.dumps(task())], workers=1):
        if isinstance(result, Exception):
            raise result
        return pickle.loads(result)
    raise AssertionError("one task gives one result")


@dataclass
class Runs:
    """All measurements of one size."""

    layers: int
    lanes: int
    operations: int = 0
    taken: list[Measurement] = field(default_factory=list)

    def add(self) -> None:
        def run() -> tuple[int, Measurement]:
            case = case_of(Llama(self.layers), self.lanes)
            return case.operations, measure(case)

        self.operations, measurement = _isolated(run)
        self.taken.append(measurement)

    def of(self, part: str) -> list[float]:
        return [getattr(measurement, part) for measurement in self.taken]

    def micros(self) -> list[float]:
        return [seconds / self.operations * 1e6 for seconds in self.of("interpreting")]


def main(layers: Sequence[int] = LAYERS, lanes: Sequence[int] = LANES, repeats: int = REPEATS) -> None:
    most, fewest = max(layers), min(lanes)
    sizes = [(count, fewest) for count in sorted(layers)] + [(most, count) for count in sorted(lanes) if count != fewest]
    every = [Runs(count, ranks) for count, ranks in sizes]
    for _ in range(repeats):
        for runs in every:  # in turns: what else the machine does then slows all of them
            runs.add()
    _print_runs(every, repeats)
    _print_targets(shallow=every[0], deep=every[len(layers) - 1], wide=every[-1])


def _print_runs(every: Sequence[Runs], repeats: int) -> None:
    title = f"Llama, forward + backward, tensor + sequence parallel; median (least) of {repeats}"
    printed = Printed(title=title, title_justify="left")
    columns = (
        "layers",
        "lanes",
        "operations",
        "sequential",
        "ranks",
        "both",
        "µs per operation",
        "relating",
        "peak RSS",
        "added",
    )
    for column in columns:
        printed.add_column(column, justify="right")
    for runs in every:
        seconds = [f"{_spread(runs.of(part))} s" for part in ("sequential", "ranks", "interpreting")]
        relating = f"{_spread(runs.of('relating'))} s"
        memory = [f"{max(runs.of(part)) / 2**20:.0f} MB" for part in ("peak_rss", "added_rss")]
        sizes = map(str, (runs.layers, runs.lanes, runs.operations))
        printed.add_row(*sizes, *seconds, _spread(runs.micros(), 0), relating, *memory)
    Console(width=150).print(printed)
    print("An operation is a node of the sequential graph or of one rank's graph: all lanes are interpreted at once.")
    print("Every output was related, each as its parameter; the memory added is what the proof takes beside the graphs.")


def _spread(numbers: Sequence[float], digits: int = 2) -> str:
    return f"{statistics.median(numbers):.{digits}f} ({min(numbers):.{digits}f})"


def _print_targets(shallow: Runs, deep: Runs, wide: Runs) -> None:
    for name, chosen in (("median", statistics.median), ("least", min)):
        few, many, lanes = (chosen(runs.micros()) for runs in (shallow, deep, wide))
        print(f"{name}: {many:.0f} µs per operation at {deep.lanes} lanes (target: at most {MOST_MICROS}); ", end="")
        print(f"{wide.lanes} lanes take {lanes / many:.2f} times as long (target: at most {MOST_GROWTH}); ", end="")
        print(f"an operation among {deep.layers} layers takes {many / few:.2f} times one among {shallow.layers}")
