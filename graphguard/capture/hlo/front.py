"""The front end for HLO text: the module before SPMD partitioning is the sequential program, the one after it every rank's."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphguard.capture.front import Bounds, Captured, Problem, Progress, mesh_of
from graphguard.capture.hlo.devices import parts_of, shardings_of
from graphguard.capture.hlo.reader import Reader
from graphguard.capture.hlo.text import Instruction, Module, Type, parse
from graphguard.capture.jax.builder import Builder
from graphguard.capture.jax.dtypes import in_graph, is_unsigned
from graphguard.capture.jax.lowering import Diverged
from graphguard.errors import GraphFormatError, UsageError
from graphguard.graph.ir import Graph, Mesh
from graphguard.graph.matching import join
from graphguard.graph.prune import prune
from graphguard.graph.rank_class import Numbers, RankClass
from graphguard.graph.wellformed import require_wellformed
from graphguard.relation.expectation import FULL, LOCAL, Expectation

MOST_DEVICES = 256  # each is matched by itself


@dataclass(frozen=True)
class HloFrontEnd:
    """Two texts. ranges: by argument, low <= v < high."""

    before: Module
    after: Module
    mesh: Mesh
    ranges: Mapping[str, Bounds]

    def capture(self, progress: Progress | None = None) -> Captured:
        begun = time.perf_counter()
        names = self._names()
        (sequential,) = self._read(self.before, np.array([], dtype=np.int64), names)
        classes = self._read(self.after, np.arange(self.mesh.size), names)
        whole = sequential.graph()
        prune(whole)
        pairs: dict[int, list[Graph]] = {}
        for each in classes:
            held = RankClass(each.ranks, each.relation(), each.graph())
            prune(held.graph)
            pairs |= {rank: [self._relation(rank, names), held.at(rank)[1]] for rank in held.members}
        relations, graphs = (list(side) for side in zip(*(pairs[rank] for rank in sorted(pairs)), strict=True))
        for graph in (whole, *relations, *graphs):
            require_wellformed(graph)
        captured = Captured(whole, graphs, relations, join(graphs), time.perf_counter() - begun, classes=len(classes))
        captured.assumptions = sorted({text for graph in (whole, *graphs) for text in graph.assumptions})
        return captured

    def problem(self, opaque: frozenset[str], progress: Progress | None = None) -> Problem:
        captured = self.capture(progress)
        bounds: dict[str, Bounds] = {}
        for name, each in zip(self._names(), self.before.parameters, strict=True):
            bounds[name] = (0, 1 << 32) if is_unsigned(each.type[0]) else (None, None)
        unknown = next((name for name in self.ranges if name not in bounds), None)
        if unknown is not None:
            raise UsageError(f"ranges name {unknown!r}, which is no argument; they are {', '.join(bounds)}")
        return Problem(self.mesh, captured, self._expected(), {**bounds, **self.ranges})

    def _names(self) -> list[str]:
        """Of the arguments: as the program calls them, where these names differ."""
        labels = [each.label for each in self.before.parameters]
        return labels if len(set(labels)) == len(labels) else [f"arg{place}" for place in range(len(labels))]

    def _read(self, module: Module, ranks: Numbers, names: Sequence[str]) -> list[Builder]:
        builder = Builder(self.mesh, ranks)
        reader = Reader(builder, module)
        args = [self._input(reader, name, each) for name, each in zip(names, module.parameters, strict=True)]
        try:
            result = reader.computation(module.entry, args)
        except Diverged as diverged:
            kinds = np.unique(diverged.parts)
            return [each for kind in kinds for each in self._read(module, ranks[diverged.parts == kind], names)]
        results = result if isinstance(result, tuple) else (result,)
        builder.outputs = {f"result{place}": reader.tensor(each) for place, each in enumerate(results)}
        return [builder]

    def _input(self, reader: Reader, name: str, each: Instruction) -> Any:
        dtype, shape = each.type
        value = reader.build.input(name, shape, in_graph(dtype))
        least, most = self.ranges.get(name, (0, 1 << 32) if is_unsigned(dtype) else (None, None))
        reader.intervals.say(value, -np.inf if least is None else least, np.inf if most is None else most - 1)
        return value

    # ------------------------------------------------------------------ shardings
    def _relation(self, rank: int, names: Sequence[str]) -> Graph:
        builder = Builder(self.mesh, np.array([rank]))
        for name, whole, part in zip(names, self.before.parameters, self.after.parameters, strict=True):
            cut = _cut(builder, name, whole.type, whole.sharding, rank)
            if cut.shape != part.type[1]:
                raise GraphFormatError(
                    f"the argument {name} is {part.type[1]} on a device, where its sharding says {cut.shape}"
                )
            builder.outputs[name] = cut
        return _named(builder.graph(), f"inputs of rank {rank}")

    def _expected(self) -> dict[str, Expectation]:
        root = self.before.root
        found = {}
        for place, (kind, sharding) in enumerate(zip(root.types, shardings_of(root.sharding, len(root.types)), strict=True)):
            if sharding is None:
                continue
            graphs = []
            for rank in range(self.mesh.size):
                builder = Builder(self.mesh, np.array([rank]))
                builder.outputs[LOCAL] = _cut(builder, FULL, kind, sharding, rank)
                graphs.append(_named(builder.graph(), f"expected result{place} of rank {rank}"))
            found[f"result{place}"] = Expectation(f"the sharding {sharding}", graphs=tuple(graphs))
        return found


def _cut(builder: Builder, name: str, type_: Type, sharding: str | None, rank: int) -> Any:
    """A device's part of an array."""
    dtype, shape = type_
    x = builder.input(name, shape, in_graph(dtype))
    for dim, (place, count) in enumerate(parts_of(sharding, rank)):
        if dim >= len(shape) or shape[dim] % count:
            raise GraphFormatError(f"the sharding {sharding} does not cut {name}, {shape}, into equal parts")
        size = shape[dim] // count
        if count > 1:
            x = builder.aten("slice.Tensor", x, dim, place * size, (place + 1) * size, 1)
    return x


def _named(graph: Graph, name: str) -> Graph:
    graph.name = name
    return graph


def texts(
    before: str, after: str, mesh: Mapping[str, int] | None, ranges: Mapping[str, Bounds] | None, files: tuple[str, str]
) -> HloFrontEnd:
    """Of two dumps."""
    whole, split = parse(before, files[0]), parse(after, files[1])
    count = split.partitions
    if not 1 < count <= MOST_DEVICES:
        raise GraphFormatError(f"{files[1]}: it is for {count} partitions; from 2 to {MOST_DEVICES} can be read")
    made = mesh_of(mesh or {"device": count})
    if made.size != count:
        raise UsageError(f"the mesh {made} has {made.size} devices, and {files[1]} is for {count}")
    if len(whole.parameters) != len(split.parameters) or len(whole.root.types) != len(split.root.types):
        raise GraphFormatError(f"{files[0]} and {files[1]} are not of one program: they have other arguments or results")
    return HloFrontEnd(whole, split, made, dict(ranges or {}))
