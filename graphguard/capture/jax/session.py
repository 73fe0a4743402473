"""Captures a check: the sequential program, and the ranks by classes, of which one walk over the jaxpr serves each."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graphguard.capture.front import Bounds, Captured, captured_by_classes
from graphguard.capture.jax import rules  # noqa: F401 # registers them
from graphguard.capture.jax.builder import Builder
from graphguard.capture.jax.dtypes import in_graph, is_key
from graphguard.capture.jax.kernels import KernelLemma
from graphguard.capture.jax.lowering import Diverged, Lowering, Sharded, Spec
from graphguard.capture.jax.trace import Argument, Traced
from graphguard.graph.class_matching import join_classes
from graphguard.graph.ir import Graph, Mesh, Value
from graphguard.graph.matching import join
from graphguard.graph.placement import REPLICATE, Placements, Shard
from graphguard.graph.prune import prune
from graphguard.graph.rank_class import Numbers, RankClass
from graphguard.graph.wellformed import require_wellformed

WRITTEN_OUT = 32  # ranks, at the most, that are matched one by one


@dataclass
class Session:
    """Two programs of the same arguments, on a mesh."""

    mesh: Mesh
    arguments: Sequence[Argument]
    bounds: Mapping[str, Bounds]
    kernels: Mapping[str, KernelLemma] = field(default_factory=dict)
    placements: dict[str, Placements] = field(default_factory=dict)  # of outputs, by their specs

    def capture(self, sequential: Traced, distributed: Traced) -> Captured:
        begun = time.perf_counter()
        whole = self.walked(sequential, np.array([], dtype=np.int64))[0].graph()
        prune(whole)
        require_wellformed(whole)
        builders = self.walked(distributed, np.arange(self.mesh.size))
        classes = [RankClass(each.ranks, each.relation(), _pruned(each.graph())) for each in builders]
        captured = self._joined(whole, classes)
        captured.classes = len(classes)
        captured.assumptions = sorted({a for graph in (whole, *(each.graph for each in classes)) for a in graph.assumptions})
        captured.seconds = time.perf_counter() - begun
        return captured

    def _joined(self, whole: Graph, classes: list[RankClass]) -> Captured:
        """Few ranks are written out, and matched one by one."""
        if self.mesh.size > WRITTEN_OUT:
            for each in classes:
                for rank in (each.members[0], each.members[-1]):
                    for graph in each.at(rank):
                        require_wellformed(graph)
            return captured_by_classes(whole, join_classes(classes, self.mesh))
        pairs = dict(sorted((rank, each.at(rank)) for each in classes for rank in each.members))
        for graphs in pairs.values():
            for graph in graphs:
                require_wellformed(graph)
        relations, graphs = (list(side) for side in zip(*pairs.values(), strict=True))
        return Captured(whole, graphs, relations, join(graphs))

    def walked(self, program: Traced, ranks: Numbers) -> list[Builder]:
        """One builder for each class of ranks that go the same way."""
        builder = Builder(self.mesh, ranks)
        try:
            self._walk(program, builder)
        except Diverged as diverged:
            kinds = np.unique(diverged.parts)
            return [each for kind in kinds for each in self.walked(program, ranks[diverged.parts == kind])]
        return [builder]

    def _walk(self, program: Traced, builder: Builder) -> None:
        low = Lowering(builder, self.kernels)
        inputs = [self._input(low, each) for each in self.arguments]
        results = low.run(program.jaxpr.jaxpr, program.jaxpr.consts, inputs)
        for path, result in zip(program.paths, results, strict=True):
            builder.source = None
            placed = None if builder.is_sequential else _placements(result, self.mesh)
            if placed is not None:
                self.placements[path] = placed
                result = result.local if isinstance(result, Sharded) else result
            elif not builder.is_sequential:
                self.placements[path] = (REPLICATE,) * len(self.mesh.axes)
            builder.outputs[path] = low.tensor(result)

    def _input(self, low: Lowering, argument: Argument) -> Value:
        shape = (*argument.shape, 2) if is_key(argument.dtype) else argument.shape
        value = low.build.input(argument.name, shape, in_graph(argument.dtype))
        least, most = self.bounds[argument.name]
        low.intervals.say(value, -np.inf if least is None else least, np.inf if most is None else most - 1)
        return value


def _placements(result: Any, mesh: Mesh) -> Placements | None:
    """What a spec says in placements; None where axes split a dim in another order than the mesh's."""
    if not isinstance(result, Sharded):
        return (REPLICATE,) * len(mesh.axes)
    found = dict.fromkeys(mesh.names, REPLICATE)
    spec: Spec = result.spec
    for dim, axes in enumerate(spec):
        if list(axes) != sorted(axes, key=mesh.names.index):
            return None
        found.update(dict.fromkeys(axes, Shard(dim)))  # type: ignore[arg-type]
    return tuple(found.values())


def _pruned(graph: Graph) -> Graph:
    prune(graph)
    return graph
