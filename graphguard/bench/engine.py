"""`graphguard bench engine`: a Llama of 126 layers, forward and backward, and its ranks under tensor + sequence parallelism.

Both graphs are interpreted and every output is related; capture is not counted. An operation is a node of the sequential graph
or of one rank's graph: ranks of equal structure are interpreted at once, so their nodes are counted once. Three ranks are
captured, the first two and the last; the numbers in which they differ go by equal steps, and give those of all other ranks.
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

import numpy as np
from rich.console import Console
from rich.table import Table as Printed

from graphguard.bench.llama import Llama
from graphguard.capture.torch.isolate import run_isolated
from graphguard.capture.torch.program import FunctionProgram
from graphguard.capture.torch.session import Take, capture_takes
from graphguard.capture.torch.subject import Subject
from graphguard.engine.interpret import Interpretation, Interpreter
from graphguard.engine.prove import _Prover, without_collection
from graphguard.engine.ranks.rank_classes import Stream, streams, varying
from graphguard.engine.store.table import Table
from graphguard.errors import InternalError
from graphguard.graph import json as graph_json
from graphguard.graph.ir import Graph, Mesh, Node
from graphguard.graph.matching import Joint, Match
from graphguard.graph.placement import REPLICATE, Shard
from graphguard.lemmas.known import all_lemmas
from graphguard.relation.expectation import Expectation

LAYERS = (16, 63, 126)
LANES = (8, 1024)
REPEATS = 3
MOST_MICROS, MOST_GROWTH = 100, 1.5  # per operation at the fewest lanes; of the time from the fewest lanes to the most


# ---------------------------------------------------------------------- graphs of very many ranks
@dataclass
class Steps(Stream):
    """Ranks whose numbers go by equal steps: one graph stands for all."""

    steps: dict[tuple[str, int, int], int] = field(default_factory=dict)  # by part, position of the node, place of the argument

    def arguments(self, part: str, position: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        alone = Stream(self.ranks[:1], self.graphs[:1], self.relations[:1])
        args, kwargs = alone.arguments(part, position)
        varied = list(args)
        for place in range(len(varied)):
            step = self.steps.get((part, position, place))
            if step is not None:
                varied[place] = varied[place] + step * np.arange(self.lanes, dtype=np.int64)
        return tuple(varied), kwargs


class Case(NamedTuple):
    """The two graphs of a proof, with the ranks as one stream."""

    sequential: Graph
    stream: Steps
    joint: Joint
    expected: dict[str, Expectation]
    ranges: dict[str, tuple[int, int]]

    @property
    def operations(self) -> int:
        return len(self.sequential.nodes) + len(self.stream.graphs[0].nodes)


def captured(llama: Llama, ranks: int) -> list[list[str]]:
    """The graphs of the sequential program, and of the first, the second and the last rank, as texts."""
    programs = FunctionProgram(llama.sequential, "sequential"), FunctionProgram(llama.distributed, "distributed")
    subject = Subject(*programs, Mesh.of({"tp": ranks}), llama.inputs())
    takes = [Take(rank) for rank in (None, 0, 1, ranks - 1)]
    answers = capture_takes(subject, takes, None, True, None, {})
    return [[graph_json.dumps(graph) for graph in answers[take].graphs] for take in takes]


def case_of(llama: Llama, ranks: int, texts: Sequence[Sequence[str]]) -> Case:
    sequential = graph_json.loads(texts[0][0])
    relations, graphs = zip(*(map(graph_json.loads, pair) for pair in texts[1:]), strict=True)
    expected = {f"grads.{name}": _expectation(placement) for name, (_, placement) in llama.layout().items()}
    expected["loss"] = Expectation(str(REPLICATE), (REPLICATE,))
    ids = dict.fromkeys(("tokens", "target"), (0, llama.vocab))
    stream = stream_of(relations, graphs, ranks)
    return Case(sequential, stream, joint_of(stream), expected, ids)


def _expectation(placement: Any) -> Expectation:
    placed = Shard(placement.dim) if placement.is_shard() else REPLICATE
    return Expectation(str(placed), (placed,))


def stream_of(relations: Sequence[Graph], graphs: Sequence[Graph], ranks: int) -> Steps:
    """All ranks from the graphs of the first, the second and the last."""
    if len(streams(graphs, relations)) != 1:
        raise InternalError("the ranks of the benchmark are not of one class")
    steps = {("graphs", *where): step for where, step in _steps(graphs, ranks).items()}
    steps |= {("relations", *where): step for where, step in _steps(relations, ranks).items()}
    return Steps(list(range(ranks)), [graphs[0]] * ranks, [relations[0]] * ranks, steps)


def _steps(graphs: Sequence[Graph], ranks: int) -> dict[tuple[int, int], int]:
    first, _, last = graphs
    if any(list(graph.constants.values()) != list(first.constants.values()) for graph in graphs):
        raise InternalError("the ranks of the benchmark have constants of their own")
    found: dict[tuple[int, int], int] = {}
    for position, nodes in enumerate(zip(*(graph.nodes for graph in graphs), strict=True)):
        for place in varying(nodes[0].op):
            numbers: list[Any] = [node.args[place] for node in nodes if place < len(node.args)]
            if not numbers or type(numbers[0]) is not int or len(set(numbers)) == 1:
                continue
            step = numbers[1] - numbers[0]
            if numbers[2] != numbers[0] + step * (ranks - 1):
                raise InternalError(f"{last.nodes[position]} of the benchmark does not follow from the first ranks")
            found[position, place] = step
    return found


def joint_of(stream: Stream) -> Joint:
    """Every communication is one of all ranks, at the same position."""
    everyone = tuple(stream.ranks)
    matches: dict[Node, Match] = {}
    for node in stream.graphs[0].nodes:
        if node.communicates and node.op != "dist.wait":
            if node.kwargs["group"] != everyone:
                raise InternalError(f"{node} of the benchmark is not of all ranks")
            matches[node] = Match(len(matches), node.op, everyone, dict.fromkeys(everyone, node))
    return Joint(stream.graphs, list(matches.values()), [], matches)


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
    (environment,) = interpreter.run_streams([case.stream], case.joint, inputs)
    interpreted = time.perf_counter()
    found = Interpretation(
        table, interpreter.lemmas, sequential, [(case.stream, environment)], interpreter.opaque, interpreter.fallbacks
    )
    proof = _Prover(found, case.sequential, case.joint, case.expected).run()
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
    texts: list[list[str]]
    operations: int = 0
    taken: list[Measurement] = field(default_factory=list)

    def add(self) -> None:
        def run() -> tuple[int, Measurement]:
            case = case_of(Llama(self.layers), self.lanes, self.texts)
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
    every = [Runs(count, ranks, captured(Llama(count), ranks)) for count, ranks in sizes]
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
