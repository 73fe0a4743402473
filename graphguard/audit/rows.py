"""The lemma audit: every row against torch's own execution, on whole tensors and on shards in several lanes.

Samples are captured and described as programs are; then what each operation is described as is evaluated and compared with
what torch computes. The first operation whose description is off is the wrong one. Where the shards' results make up the whole
result in numbers, the descriptions should show it; a row whose description does not could be weaker.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from graphguard.aten.kernels import Kernels
from graphguard.audit.samples import SAMPLES, Sample
from graphguard.audit.shards import Cut, Example, Tensors
from graphguard.audit.vetting import vetted
from graphguard.capture.torch.program import FunctionProgram
from graphguard.capture.torch.relation.inputs import Input
from graphguard.capture.torch.session import capture_sequential
from graphguard.engine.algebra.value import cut as cut_value
from graphguard.engine.interpret import Interpreter
from graphguard.engine.numeric.claims import _difference as difference
from graphguard.engine.numeric.evaluator import Evaluator, Malformed, TooLarge, Unlearned
from graphguard.engine.relate.outputs import Held, OutputPart, Relator
from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import collapse
from graphguard.engine.terms.term import Undescribed, Value
from graphguard.engine.terms.unknown import Described, Environment, Unknown
from graphguard.errors import GraphGuardError, ReplayError, UsageError
from graphguard.graph.ir import Graph, Mesh, Node
from graphguard.graph.ir import Value as Tensor
from graphguard.graph.placement import REPLICATE, SUM, Partial, Placement, Replicate, Shard
from graphguard.lemmas import known, registry
from graphguard.lemmas.dtypes import signature
from graphguard.lemmas.known import all_lemmas
from graphguard.lemmas.rule import spelled
from graphguard.lemmas.user import Lemma
from graphguard.oracle.replay import run

TOLERANCE = 1e-7
BATCH = 24  # samples that are captured at once
CONFIRMATIONS = 8  # runs on other numbers in which shards must make up the whole, before that counts
UNDEFINED = "not defined"
Results = Mapping[Tensor, torch.Tensor]


@dataclass
class Line:
    """What the audit found of one operator."""

    operator: str
    cases: int = 0  # results that were compared
    wrong: list[str] = field(default_factory=list)
    weaker: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # whole tensors of stated sizes that the row does not describe
    seconds: float = 0.0
    note: str = ""  # why there is nothing to compare
    right: dict[str, int] = field(default_factory=dict)  # how often, by the dtypes of the call


class Ledger(dict[str, Line]):
    """Lines by operator, made when they are first written to."""

    def __missing__(self, operator: str) -> Line:
        self[operator] = Line(operator)
        return self[operator]

    def of(self, node: Node) -> Line | None:
        row = known.lookup(node.op)
        return None if row is None else self[row.operator]


def audit(
    samples: Iterable[Sample], *, examples: int = 1, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> Ledger:
    """Examine samples, each with so many different sizes, numbers and shards."""
    ledger, wanted = Ledger(), list(samples)
    for number in range(examples):
        for start in range(0, len(wanted), BATCH):
            if progress is not None:
                progress(number * len(wanted) + start, examples * len(wanted))
            batch = [Example(sample, seed, number) for sample in wanted[start : start + BATCH]]
            for example, graphs in captured(batch):
                Examination(ledger, example, graphs).run()
    return ledger


def audit_lemmas(lemmas: Iterable[Lemma], *, examples: int = 1, seed: int = 0) -> list[Line]:
    """A line for each lemma of the user's."""
    lines = []
    for lemma in lemmas:
        begun, line = time.perf_counter(), Line(lemma.name)
        try:
            found = vetted(lemma, lemma.sample, examples=examples, seed=seed)
            line.cases, line.note = found.checked, f"trusted: {found.untested}" if found.untested else "yours"
            line.weaker += [found.weaker] if found.weaker else []
        except UsageError as error:
            line.wrong.append(str(error))
        line.seconds = time.perf_counter() - begun
        lines.append(line)
    return lines


def samples_of(operators: Iterable[str]) -> list[Sample]:
    """The samples that call one of the operators."""
    wanted = set(operators)
    return [SAMPLES[name] for name, met in operators_met().items() if met & wanted]


class Uncut(Example):
    """A sample as it states itself, on whole tensors."""

    def _cuts(self, number: int) -> Iterator[Cut]:
        return iter(())


@functools.cache
def operators_met() -> dict[str, set[str]]:
    """The rows that each sample makes use of."""
    found = {}
    for example, graphs in captured([Uncut(sample, 0, 0) for sample in SAMPLES.values()]):
        rows = (known.lookup(node.op) for node in graphs[0].nodes)
        found[example.sample.name] = {row.operator for row in rows if row is not None}
    return found


def rows_named(names: Iterable[str]) -> list[str]:
    """The operators that names mean: `aten.mm.default`, `aten.mm`, `mm`, or a family of rows such as `norm`."""
    rows, result = list(known.rows()), []
    for name in names:
        plain = name.replace("::", ".")
        found = [
            row.operator
            for row in rows
            if plain in (row.operator, row.operator.rsplit(".", 1)[0], row.operator.split(".")[1], row.kind)
        ]
        if not found:
            raise UsageError(f"there is no lemma {name!r}; `graphguard lemmas ls` lists them")
        result += found
    return sorted(set(result))


# ---------------------------------------------------------------------- capture
def captured(batch: Sequence[Example]) -> Iterator[tuple[Example, list[Graph]]]:
    """Each example with the graphs of its whole program and of each cut, captured at once."""
    programs = {
        f"{number}:{place}": (example, given)
        for number, example in enumerate(batch)
        for place, given in enumerate([example.full, *(cut.local(example.full, 0) for cut in example.cuts)])
    }

    def program(**tensors: torch.Tensor) -> Any:
        return {
            key: example.sample.program(**{name: tensors[f"{key}/{name}"] for name in given})
            for key, (example, given) in programs.items()
        }

    inputs = {
        f"{key}/{name}": Input(tuple(tensor.shape), dtype=example.sample.inputs[name].dtype)
        for key, (example, given) in programs.items()
        for name, tensor in given.items()
    }
    try:
        graph = capture_sequential(FunctionProgram(program, "sequential"), inputs)
    except GraphGuardError:
        if len(batch) > 1:
            for example in batch:
                yield from captured([example])
            return
        if batch[0].sample is batch[0].stated:
            raise
        batch[0].restated()  # a program that runs with other sizes, but in a way that has no graph
        yield from captured(batch)
        return
    makers = {tensor: place for place, node in enumerate(graph.nodes) for tensor in node.outputs}
    for number, example in enumerate(batch):
        yield example, [_part(graph, f"{number}:{place}", makers) for place in range(len(example.cuts) + 1)]


def _part(graph: Graph, key: str, makers: Mapping[Tensor, int]) -> Graph:
    """What belongs to one of the programs that were captured together."""
    outputs = {path: value for path, value in graph.outputs.items() if path.split(".")[0] == key}
    waiting, places, seen = [value for value in outputs.values() if value is not None], set(), set()
    while waiting:
        tensor = waiting.pop()
        if tensor in makers and makers[tensor] not in places:
            places.add(makers[tensor])
            waiting += graph.nodes[makers[tensor]].operands()
        seen.add(tensor)
    inputs = {n.partition("/")[2]: value for n, value in graph.inputs.items() if n.partition("/")[0] == key}
    constants = {value: constant for value, constant in graph.constants.items() if value in seen}
    return Graph(key, inputs, outputs, [graph.nodes[place] for place in sorted(places)], constants)


# ---------------------------------------------------------------------- one sample
class Watching(Interpreter):
    """Notes the nodes that no row described, and the time that each operator takes."""

    def __init__(self, table: Table, ledger: Ledger):
        super().__init__(table, all_lemmas())
        self.ledger = ledger
        self.fallen: dict[int, str] = {}

    def describe(self, node: Node, args: Any, kwargs: Any, lanes: int) -> list[Described]:
        begun, before = time.perf_counter(), len(self.fallbacks)
        try:
            results = super().describe(node, args, kwargs, lanes)
        except Exception as error:  # no row may raise anything but Undescribed
            results = [Unknown(str(error), node)] * len(node.outputs)
            line = self.ledger.of(node)
            if line is not None:
                line.wrong.append(f"{node}: its description raises {type(error).__name__}: {error}")
        if len(self.fallbacks) > before:
            self.fallen[id(node)] = self.fallbacks[-1][1]
        line = self.ledger.of(node)
        if line is not None:
            line.seconds += time.perf_counter() - begun
        return results


class Examination:
    """One example: described whole and in shards, then compared with torch."""

    def __init__(self, ledger: Ledger, example: Example, graphs: Sequence[Graph]):
        self.ledger, self.example, self.sample = ledger, example, example.sample
        self.whole, self.parts = graphs[0], graphs[1:]
        self.table = Table()
        self.interpreter = Watching(self.table, ledger)

    def run(self) -> None:
        inputs = self._inputs()
        environment = self.interpreter.run_sequential(self.whole, inputs)
        self.table.recording = False
        cuts = list(zip(self.example.cuts, self.parts, strict=True))
        sharded = [self._describe(cut, graph, inputs) for cut, graph in cuts]
        self.evaluator = self._evaluator()
        results = run(self.whole, self.example.full, wide=True).values
        self._compare(self.whole, environment, results, 0, "whole")
        for (cut, graph), described in zip(cuts, sharded, strict=True):
            held = executed(graph, cut, self.example.full)
            for lane, values in enumerate(held):
                self._compare(graph, described, values, lane, f"lane {lane} of {cut}")
            if cut.tiles and held:
                Comparison(self, cut, graph, environment, described, results, held).run()
        if self.sample is self.example.stated:
            self._note_refusals()

    def _inputs(self) -> dict[str, Value]:
        inputs = {name: self.interpreter.input(name, registry.described_shape(v)) for name, v in self.whole.inputs.items()}
        for name, spec in self.sample.inputs.items():
            is_range = not (spec.dtype.is_floating_point or spec.dtype.is_complex or spec.dtype == torch.bool)
            if is_range and spec.declared:
                for term in inputs[name].terms:
                    self.table.facts.declare(term.factors[0].atom, int(spec.low), int(spec.high))
        return inputs

    def _describe(self, cut: Cut, graph: Graph, inputs: Mapping[str, Value]) -> Environment:
        local = dict(inputs)
        for name, dim in cut.dims.items():
            starts = np.array(cut.windows[name].starts, dtype=np.int64)
            stops = starts + cut.windows[name].size
            local[name] = cut_value(self.table, inputs[name], dim, collapse(starts), collapse(stops))
        return self.interpreter.run_lanes(graph, local, cut.lanes)

    def _evaluator(self) -> Evaluator:
        arrays = {name: as_array(tensor) for name, tensor in self.example.full.items()}
        constants = {
            key: as_array(Kernels(True).tensor(key))  # type: ignore[arg-type]
            for (kind, key), _ in self.table.atoms()
            if kind == "constant"
        }
        return Evaluator(self.table, arrays, constants)

    def _note_refusals(self) -> None:
        for node in self.whole.nodes:
            line = self.ledger.of(node)
            if id(node) in self.interpreter.fallen and line is not None:
                line.refused.append(f"{self.sample.name}: {node}: {self.interpreter.fallen[id(node)]}")

    def _compare(self, graph: Graph, environment: Environment, results: Results, lane: int, where: str) -> None:
        """Every operation's results, in order: what is made of wrong ones is nobody's fault."""
        tainted: set[Tensor] = set()
        for node in graph.nodes:
            begun, line = time.perf_counter(), self.ledger.of(node)
            if not tainted.isdisjoint(node.operands()):
                tainted.update(node.outputs)
                continue
            finite = all(bool(results[tensor].isfinite().all()) for tensor in node.operands() if tensor in results)
            for tensor in node.outputs:
                wrong = self._difference(environment.get(tensor), results.get(tensor), lane, finite)
                if wrong is None:
                    continue
                if wrong is UNDEFINED:
                    tainted.add(tensor)
                    continue
                if line is not None:
                    line.cases += 1
                if line is not None and not wrong:
                    called = signature(line.operator, node, node.op)
                    line.right[called] = line.right.get(called, 0) + 1
                if wrong:
                    tainted.add(tensor)
                    if line is not None:
                        line.wrong.append(f"{self.sample.name}, {where}: {node}: {wrong}")
            if line is not None:
                line.seconds += time.perf_counter() - begun

    def _difference(self, described: Described | None, result: torch.Tensor | None, lane: int, finite: bool) -> str | None:
        """How a result differs from what it is described as; empty if it does not, None if that cannot be said. What makes
        no number of finite ones, as 0 / 0, is not defined there, and nothing is claimed."""
        if not isinstance(described, Value) or result is None:
            return None
        held = as_array(result)
        try:
            self.evaluator.learn(described, lane, held)
            said = self.evaluator.value(described, lane)
        except Malformed as error:
            return f"its description means nothing: {error}"
        except (Unlearned, TooLarge):
            return None
        if said.shape != held.shape:
            return f"described with the shape {said.shape}, not {held.shape}"
        apart = difference(said, held)
        if finite and np.isnan(held).any():
            return UNDEFINED
        if not apart.size or apart.max() <= TOLERANCE:
            return ""
        place = np.unravel_index(int(apart.argmax()), apart.shape)
        return f"{held[place]:.9g} at {list(map(int, place))} is described as {said[place]:.9g}"


def executed(graph: Graph, cut: Cut, full: Tensors) -> list[Results]:
    """What torch computes of each lane's shards; nothing if it does not take them."""
    try:
        return [run(graph, cut.local(full, lane), wide=True).values for lane in range(cut.lanes)]
    except ReplayError:
        return []


class Comparison:
    """Shards that tile their inputs: where torch's results make up the whole result, the descriptions should show it."""

    def __init__(
        self,
        examination: Examination,
        cut: Cut,
        graph: Graph,
        before: Environment,
        after: Environment,
        results: Results,
        held: Sequence[Results],
    ):
        self.examination, self.cut, self.graph = examination, cut, graph
        self.before, self.after = before, after
        self.runs: list[tuple[Results, Sequence[Results]] | None] = [(results, held)]
        self.relator = Relator(examination.interpreter.ops)
        self.mesh = Mesh.of({"shards": cut.lanes})

    def run(self) -> None:
        whole = self.examination.whole
        if [node.op for node in whole.nodes] != [node.op for node in self.graph.nodes]:
            return
        related = {value for name, value in self.graph.inputs.items() if name in whole.inputs}
        for first, second in zip(whole.nodes, self.graph.nodes, strict=True):
            operands = list(zip(first.operands(), second.operands(), strict=False))
            if not all(b in related or self._is_same_constant(a, b) for a, b in operands):
                continue
            line = self.examination.ledger.of(first)
            for a, b in zip(first.outputs, second.outputs, strict=True):
                shown = self._shown(a, b)
                if shown is None:
                    continue
                if not shown:
                    related.add(b)
                elif line is not None and _is_same_call(first, second):
                    reason = self.examination.interpreter.fallen.get(id(second), "its description does not show that")
                    line.weaker.append(f"{self.examination.sample.name}, {self.cut}: {second}: {shown}; {reason}")

    def _is_same_constant(self, a: Tensor, b: Tensor) -> bool:
        constants = self.examination.whole.constants
        return a in constants and constants[a] == self.graph.constants.get(b)

    def _shown(self, a: Tensor, b: Tensor) -> str | None:
        """Empty if the descriptions say how shards make up the whole; how they do in numbers, if not; None if they do not."""
        whole, part = self.before.get(a), self.after.get(b)
        if not isinstance(whole, Value):
            return None
        held = [placement for placement in self._placements(a, b) if self._holds(a, b, placement, 0)]
        if isinstance(part, Value) and any(self._is_described(whole, part, placement) for placement in held):
            return ""
        for placement in held:
            if all(self._holds(a, b, placement, number) for number in range(1, CONFIRMATIONS + 1)) and self._varies(a):
                return _WORDS[type(placement)]
        return None

    def _varies(self, a: Tensor) -> bool:
        """Whether runs differ: that any of many is true shows nothing if it always is."""
        arrays = [as_array(each[0][a]) for each in self.runs if each is not None]
        return any(not _close(arrays[0], other) for other in arrays[1:])

    @staticmethod
    def _placements(a: Tensor, b: Tensor) -> list[Placement]:
        if a.shape == b.shape:
            return [REPLICATE, SUM]
        if len(a.shape) != len(b.shape):
            return []
        dims = [dim for dim, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y]
        return [Shard(dims[0])] if len(dims) == 1 else []

    def _holds(self, a: Tensor, b: Tensor, placement: Placement, number: int) -> bool:
        """Whether one of the runs bears a relation out."""
        while len(self.runs) <= number:
            self.runs.append(self._another_run())
        results, held = self.runs[number] or ({}, ())
        if a not in results or any(b not in lane for lane in held):
            return False
        whole, parts = as_array(results[a]), [as_array(lane[b]) for lane in held]
        if isinstance(placement, Shard):
            joined = np.concatenate(parts, axis=placement.dim)
            return joined.shape == whole.shape and _close(whole, joined)
        if placement == SUM:
            return _close(whole, np.sum([np.asarray(part, dtype=float) for part in parts], axis=0))
        return all(_close(whole, part) for part in parts)

    def _another_run(self) -> tuple[Results, Sequence[Results]] | None:
        """Other numbers; None if they do not go through in shards, as positions that lie outside of one."""
        full = self.examination.example.tensors()
        held = executed(self.graph, self.cut, full)
        return (run(self.examination.whole, full, wide=True).values, held) if held else None

    def _is_described(self, whole: Value, part: Value, placement: Placement) -> bool:
        output = Held(self.mesh, tuple(range(self.cut.lanes)), [OutputPart(tuple(range(self.cut.lanes)), part)])
        sizes = [int(size) for size in whole.shape]
        try:
            return self.relator.fits(sizes, output, (placement,)) and self.relator.holds(whole, output, (placement,))
        except Undescribed:
            return False


def _is_same_call(a: Node, b: Node) -> bool:
    """Whether two operations were given the same beside tensors: sizes, as of a view, are others in shards."""
    return [*map(spelled, a.args), *map(spelled, a.kwargs.values())] == [
        *map(spelled, b.args),
        *map(spelled, b.kwargs.values()),
    ]


_WORDS = {
    Replicate: "each shard's result is the whole one",
    Shard: "the shards' results, joined, are the whole one",
    Partial: "the shards' results add up to the whole one",
}


def _close(a: Any, b: Any) -> bool:
    apart = difference(np.asarray(b, dtype=float), np.asarray(a, dtype=float))
    return not apart.size or bool(apart.max() <= TOLERANCE)


def as_array(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().resolve_conj()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).to(torch.float64).numpy(force=True)


__all__ = [
    "Ledger",
    "Line",
    "Uncut",
    "audit",
    "audit_lemmas",
    "captured",
    "operators_met",
    "rows_named",
    "samples_of",
]
