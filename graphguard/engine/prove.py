"""The proof: describe both programs over one table, then relate every output."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from graphguard.engine.classes import streams as classes_of
from graphguard.engine.interpret import Described, Interpretation, Interpreter, Unknown
from graphguard.engine.ops import Ops
from graphguard.engine.proof import Proof, Relation
from graphguard.engine.relate import Held, Placements, Relator, held
from graphguard.engine.show import relation_of
from graphguard.engine.table import Table
from graphguard.engine.term import Value
from graphguard.findings import Finding
from graphguard.ir import Graph, Mesh
from graphguard.joint import Joint

if TYPE_CHECKING:
    from graphguard.expectation import Expectation

Ranges = Mapping[str, tuple[int | None, int | None]]


def prove(
    sequential: Graph,
    joint: Joint,
    relations: Sequence[Graph],
    *,
    expected: Mapping[str, Expectation] | None = None,
    ranges: Ranges | None = None,
) -> Proof:
    """How every sequential output is rebuilt from the ranks' outputs, for all inputs; or why that is not known."""
    begun = time.perf_counter()
    found = interpret(sequential, joint, relations, ranges or {})
    proof = _Prover(found, sequential, joint, expected or {}).run()
    proof.seconds = time.perf_counter() - begun
    return proof


def interpret(sequential: Graph, joint: Joint, relations: Sequence[Graph], ranges: Ranges) -> Interpretation:
    """Descriptions of all tensors of both programs."""
    table = Table()
    interpreter = Interpreter(table)
    inputs = {name: interpreter.input(name, value.shape) for name, value in sequential.inputs.items()}
    for name, (low, high) in ranges.items():
        if low is not None and high is not None:
            for term in inputs[name].terms:
                table.declare(term.factors[0].atom, low, high)
    found = Interpretation(table)
    found.sequential = interpreter.run_sequential(sequential, inputs)
    table.recording = False
    streams = classes_of(joint.graphs, relations)
    found.streams = list(zip(streams, interpreter.run_streams(streams, joint, inputs), strict=True))
    found.opaque, found.fallbacks = interpreter.opaque, interpreter.fallbacks
    return found


class _Prover:
    def __init__(self, found: Interpretation, sequential: Graph, joint: Joint, expected: Mapping[str, Expectation]):
        self.found, self.sequential, self.joint, self.expected = found, sequential, joint, expected
        mesh = joint.graphs[0].mesh
        self.mesh = mesh if mesh is not None else Mesh.of({"world": len(joint.graphs)})
        self.relator = Relator(Ops(found.table))
        self.proof = Proof()

    def run(self) -> Proof:
        for path, tensor in self.sequential.outputs.items():
            if tensor is None:
                continue
            result = self._relate(path, self.found.sequential[tensor])
            if isinstance(result, Relation):
                self.proof.relations[path] = result
            else:
                self.proof.findings.append(result)
        self.proof.opaque = sorted(self.found.opaque)
        self.proof.operations = len(self.sequential.nodes) + sum(len(s.graphs[0].nodes) * s.lanes for s, _ in self.found.streams)
        self.proof.assumptions = self._assumptions()
        return self.proof

    def _assumptions(self) -> list[str]:
        names = {atom.id: key for (kind, key), atom in self.found.table.atoms() if kind == "input"}
        return [
            f"{low} <= {names[atom]} < {high}" for atom, (low, high) in sorted(self.found.table.bounds.items()) if atom in names
        ]

    def output_of_ranks(self, path: str) -> Held | None:
        values: list[tuple[tuple[int, ...], Described | None]] = []
        for stream, environment in self.found.streams:
            tensor = stream.graphs[0].outputs.get(path)
            values.append((tuple(stream.ranks), None if tensor is None else environment[tensor]))
        return held(self.mesh, {}, values)

    def _relate(self, path: str, whole: Described) -> Relation | Finding:
        if all(graph.outputs.get(path) is None for graph in self.joint.graphs):
            return Finding("missing-output", f"no rank returns {path}")
        output = self.output_of_ranks(path)
        if output is None:
            return Finding("unexplained-output", f"the ranks that return {path} do not form a grid of the mesh")
        if isinstance(whole, Unknown):
            return self._stopped(path, whole)
        if output.unknown is not None:
            return self._stopped(path, output.unknown)
        expectation = self.expected.get(path)
        if expectation is not None:
            return self._as_expected(path, whole, output, expectation)
        return self._infer(path, whole, output)

    def _stopped(self, path: str, unknown: Unknown) -> Finding:
        where = unknown.node.source if unknown.node is not None else None
        return Finding("relation-lost", f"{path} has no description: {unknown.reason}", distributed=where)

    def _infer(self, path: str, whole: Value, output: Held) -> Relation | Finding:
        sizes = [int(size) for size in whole.shape]  # type: ignore[arg-type]
        for placements in self.relator.candidates(sizes, output):
            if self.relator.holds(whole, output, placements):
                if "Partial(sum)" in placements and self.relator.is_scaled_copy(whole, output, placements):
                    return Finding("scaled-copies", f"{path}: the ranks hold equal copies that only sum to the sequential value")
                return relation_of(path, placements, output, self._type(path))
        return Finding("unexplained-output", self._difference(path, whole, output))

    def _type(self, path: str) -> tuple[str, tuple[int, ...]]:
        tensor = self.sequential.outputs[path]
        assert tensor is not None
        return tensor.dtype, tensor.shape

    def _difference(self, path: str, whole: Value, output: Held) -> str:
        factor = self.relator.factor(whole, output)
        if factor is not None:
            return f"{path}: the ranks hold {factor[0]} times the expected value"
        return f"{path}: what the ranks hold is neither the sequential value, nor a tile, nor a summand of it"

    def _as_expected(self, path: str, whole: Value, output: Held, expectation: Expectation) -> Relation | Finding:
        if expectation.placements is not None:
            placements: Placements = tuple(
                p if size > 1 else "Replicate" for p, size in zip(expectation.placements, output.mesh.shape, strict=True)
            )
            sizes = [int(size) for size in whole.shape]  # type: ignore[arg-type]
            if self.relator._fits(sizes, output, placements) and self.relator.holds(whole, output, placements):
                if "Partial(sum)" in placements and self.relator.is_scaled_copy(whole, output, placements):
                    return Finding("scaled-copies", f"{path}: the ranks hold equal copies that only sum to the sequential value")
                return relation_of(path, placements, output, self._type(path))
        other = self._infer(path, whole, output)
        if isinstance(other, Relation):
            return Finding("unexpected-relation", f"{path} is {other.text}, but {expectation.text} is expected")
        return other
