"""The proof: describe both programs over one table, then relate every output."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from graphguard.engine.algebra.value import taken
from graphguard.engine.interpret import Interpretation, Interpreter, Lemmas
from graphguard.engine.limits import Limits, ProofStops
from graphguard.engine.proof import Proof, Relation
from graphguard.engine.ranks import astray
from graphguard.engine.ranks.draws import matched
from graphguard.engine.relate.arrangements import arranged, padded
from graphguard.engine.relate.conditions import conditions_of
from graphguard.engine.relate.law import law_at
from graphguard.engine.relate.localise import Localiser, scale_in_words
from graphguard.engine.relate.outputs import Held, Relator, held, held_in_a_row
from graphguard.engine.relate.per_operation import Lister, telling
from graphguard.engine.relate.relatives import Relatives
from graphguard.engine.relate.show import arranged_relation, relation_of
from graphguard.engine.relate.summands import Summands
from graphguard.engine.store.interval import stated_interval
from graphguard.engine.store.ranges import declared_span
from graphguard.engine.store.table import Table
from graphguard.engine.tensors.ops import Ops
from graphguard.engine.terms.lane import at_lane
from graphguard.engine.terms.term import Atom, Value
from graphguard.engine.terms.unknown import Described, Unknown
from graphguard.graph.ancestry import outputs_by_node
from graphguard.graph.findings import Finding
from graphguard.graph.ir import Graph, Node, Source
from graphguard.graph.ir import Value as Tensor
from graphguard.graph.labels import may_be_ignored
from graphguard.graph.lines import OwnLines, turn_of
from graphguard.graph.operators import RESHAPES, name_of
from graphguard.graph.placement import Placements, on_mesh, partial_axes
from graphguard.graph.tensor_layout import TensorLayout
from graphguard.graph.world import World
from graphguard.relation.expectation import FULL, LOCAL, Expectation

Range = tuple[float | None, float | None]
Ranges = Mapping[str, Range]
MOST_NEEDS = 3  # told in one message
UNRELATED = "no relation to the sequential output was found"
UNEXPLAINED = "what the ranks hold was not shown to be the sequential value, a tile of it, or a summand"


def prove(
    sequential: Graph,
    world: World,
    *,
    lemmas: Lemmas,
    expected: Mapping[str, Expectation] | None = None,
    ranges: Ranges | None = None,
    locate: bool = True,
    limits: Limits | None = None,
    are_wrong: Callable[[], bool] | None = None,
) -> Proof:
    """How every sequential output is rebuilt from the ranks' outputs, for all inputs; or why that is not known.

    locate: say where each relation breaks; else the first break is told by itself, which is quicker.
    are_wrong: whether an execution shows that the ranks are wrong, so that less is tried."""
    begun = time.perf_counter()
    with without_collection():
        found = interpret(sequential, world, ranges or {}, lemmas, limits, are_wrong)
        proof = _Prover(found, sequential, world, expected or {}, locate).run()
    proof.seconds = time.perf_counter() - begun
    return proof


@contextmanager
def without_collection() -> Iterator[None]:
    """A proof makes many small objects that stay and hardly a cycle: looking for garbage takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def interpret(
    sequential: Graph,
    world: World,
    ranges: Ranges,
    lemmas: Lemmas,
    limits: Limits | None = None,
    are_wrong: Callable[[], bool] | None = None,
) -> Interpretation:
    """Descriptions of all tensors of both programs."""
    table = Table(ProofStops(limits, partial(outputs_by_node, sequential, world), are_wrong))
    table.ignores_by_default = may_be_ignored([each.graph for each in world.classes])
    interpreter = Interpreter(table, lemmas)
    inputs = {name: interpreter.input(name, value.shape) for name, value in sequential.inputs.items()}
    for name, value in inputs.items():
        _state_facts(table, [term.factors[0].atom for term in value.terms], sequential.inputs[name].dtype, ranges.get(name))
    found = Interpretation(table, lemmas, draws=matched(sequential, world))
    interpreter.draws = found.draws
    found.sequential = interpreter.run_sequential(sequential, inputs)
    table.recording, table.stops.at = False, None
    relatives = Relatives(Relator(interpreter.ops), found.sequential, world.mesh, parts=True)
    interpreter.is_related = lambda held, value: relatives.relation(held, value) is not None
    found.streams = list(zip(world.classes, interpreter.run_classes(world, inputs), strict=True))
    table.stops.at = None
    found.opaque, found.fallbacks, found.needs = interpreter.opaque, interpreter.fallbacks, interpreter.needs
    found.relied_on = list(interpreter.relied_on.values())
    return found


def _state_facts(table: Table, atoms: list[Atom], dtype: str, declared: Range | None) -> None:
    low, high = declared or (None, None)
    for atom in atoms:
        if dtype == "bool":
            atom.indicator = atom.nonnegative = True
        if dtype.startswith(("int", "uint")) and (low, high) != (None, None):
            table.facts.declare(atom, *declared_span(*(None if end is None else int(end) for end in (low, high))))
        elif (low, high) != (None, None):
            table.facts.state(atom, stated_interval(low, high))
        if low is not None:
            atom.positive, atom.nonnegative = low > 0, low >= 0


class _Prover:
    def __init__(
        self,
        found: Interpretation,
        sequential: Graph,
        world: World,
        expected: Mapping[str, Expectation],
        locate: bool = True,
    ):
        self.found, self.sequential, self.world, self.expected, self.locate = found, sequential, world, expected, locate
        self.mesh = world.mesh
        self.relator = Relator(Ops(found.table))
        self.own_lines = OwnLines(sequential)
        self.makers = _Makers()
        self.localiser = Localiser(found, sequential, self.mesh, self.relator)
        self.lister = Lister(found, sequential, self.mesh, self.relator, self.localiser)
        self.proof = Proof(listing=self.lister.programs)
        self._uses: dict[Node, Source | None] = {}  # where the results of operations are first used

    def run(self) -> Proof:
        for path, tensor in self.sequential.outputs.items():
            if tensor is None:
                continue
            self.found.table.stops.at = path
            result = self._relate(path, self.found.sequential[tensor])
            if isinstance(result, Relation):
                self.proof.relations[path] = result
            else:
                self.proof.findings.append(replace(result, output=path))
                if not self.locate:
                    break
        self.found.table.stops.at = None
        self.proof.stopped = self.found.table.stops.on_the_way_to([each.output for each in self.proof.findings if each.output])
        nodes = enumerate(self.sequential.nodes)
        places = {node.source: place for place, node in reversed(list(nodes)) if node.source}
        self.proof.findings.sort(key=partial(self._order, places))
        self.proof.opaque = sorted(self.found.opaque)
        self.proof.operations = len(self.sequential.nodes) + sum(
            len(each.graph.nodes) * each.lanes for each in self.world.classes
        )
        self.proof.assumptions = self._assumptions()
        self.proof.conditions = conditions_of(
            self.found, self.sequential, self.world, list(self.proof.relations), self.own_lines
        )
        return self.proof

    def _assumptions(self) -> list[str]:
        known = self.found.table.facts.ranges()
        inputs = [(str(key), atom) for (kind, key), atom in self.found.table.atoms() if kind == "input"]
        ranges = [text for key, atom in sorted(inputs, key=lambda each: each[1].id) if atom.id in known
                  for text in known[atom.id].in_words(key, self.sequential.inputs[key].shape)]  # fmt: skip
        declared = [(key, atom) for key, atom in inputs if atom.nonnegative and not atom.indicator]
        stated = {atom.id: each for _, atom in inputs if (each := self.found.table.facts.stated(atom)) is not None}
        told = known.keys() | stated.keys()
        signs = [f"{key} {'>' if atom.positive else '>='} 0" for key, atom in declared if atom.id not in told]
        spans = [text for key, atom in inputs if atom.id in stated for text in stated[atom.id].in_words(key)]
        return [lemma.assumption for lemma in self.found.relied_on] + ranges + signs + spans + self.found.draws.assumptions

    def output_of_ranks(self, path: str) -> Held:
        values: list[tuple[tuple[int, ...], Described | None]] = []
        for stream, environment in self.found.streams:
            tensor = stream.graph.outputs.get(path)
            values.append((stream.members, None if tensor is None else environment[tensor]))
        return held(self.mesh, values) or held_in_a_row(values)

    def _relate(self, path: str, whole: Described) -> Relation | Finding:
        fault = self._plain_fault(path)
        if fault is not None:
            return fault
        output = self.output_of_ranks(path)
        if isinstance(whole, Unknown):
            return self._stopped(path, whole)
        if output.unknown is not None:
            return self._stopped(path, output.unknown)
        expectation = self.expected.get(path)
        if expectation is not None and expectation.states_relation:
            return self._as_expected(path, whole, output, expectation)
        return self._infer(path, whole, output)

    def _plain_fault(self, path: str) -> Finding | None:
        """What is wrong with an output whatever its values are: a part of it is nowhere, or it stands for something else."""
        maker = self.makers.of(self.sequential, path)
        at = None if maker is None else maker.source
        returned = self.world.returning(path)
        if not any(returned):
            return Finding("missing-output", f"no rank returns {path}{self._under_another_name(path)}", sequential=at)
        expectation = self.expected.get(path)
        if expectation is None:
            return None
        unmet = expectation.unmet(returned)
        if unmet:
            ranks = tuple(sorted({rank for need in unmet for rank in need.ranks}))
            said = "; ".join(need.what for need in unmet[:MOST_NEEDS])
            more = f"; and {len(unmet) - MOST_NEEDS} more" if len(unmet) > MOST_NEEDS else ""
            return Finding("missing-output", f"{path}: {said}{more}", ranks, sequential=at)
        if expectation.wrong is not None:
            return Finding("unexplained-output", f"{path}: {expectation.wrong}", sequential=at, plain=True)
        return None

    def _under_another_name(self, path: str) -> str:
        """What ranks return in its place, where a wrapper has put its own name before it."""
        returned = {other for each in self.world.classes for other, value in each.graph.outputs.items() if value is not None}
        longer = sorted(other for other in returned if other.endswith(f".{path}"))
        return f"; they return {longer[0]}: return what is inside of the wrapper by its own name" if longer else ""

    def _order(self, places: Mapping[Source, int], finding: Finding) -> tuple[int, int]:
        """What comes first in the program is told first."""
        where = None if finding.kind == "missing-output" else finding.sequential  # which has no line of the ranks
        return (0, places.get(where, len(places))) if where is not None else (1, 0)

    def _located(self, kind: str, path: str, message: str, detail: str | None = None) -> Finding:
        """A finding at the place where the relation of the output breaks. detail: what stopped the proof."""
        if not self.locate:
            return Finding(kind, message, detail=detail)
        place = self.localiser.place(path)
        sequential, distributed = place.sequential, place.distributed
        if distributed is None:  # all is related, to the end: the scale is wrong, or the order of the ranks
            return replace(self._at_output(kind, path, message, self._holding(path)), detail=detail)
        if place.words is not None and detail is not None:  # the place knows more than the output
            message, detail = f"{path}: {place.words}", None
        node = distributed or sequential
        operands = self.lister.operands(distributed)
        return Finding(
            kind,
            message,
            law=law_at(distributed, operands),
            holdings=telling(operands),
            sequential=None if sequential is None else sequential.source,
            distributed=self.own_lines.at(distributed),
            phase=None if node is None else "backward" if node.backward else "forward",
            sources=self._lines_around(distributed, place.others),
            detail=detail,
            turn=turn_of(distributed, self._program_of(distributed).nodes),
        )

    def _lines_around(self, node: Node, origins: Sequence[Source]) -> tuple[Source, ...]:
        """Where an operation is named, its other line, where its result is first used, and where its operands come from."""
        if node not in self._uses:
            self._uses[node] = self._first_use(node)
        own = [self.own_lines.of(source) for source in (self._uses[node], *origins)]
        lines = [self.own_lines.at(node), self.own_lines.of(node.source), node.source, *own]
        return tuple({line.place: line for line in lines if line is not None}.values())

    def _program_of(self, node: Node) -> Graph:
        return next(each.graph for each in self.world.classes if any(other is node for other in each.graph.nodes))

    def _first_use(self, node: Node) -> Source | None:
        """The line on which the result of a rank's operation is first used, if that is another one."""
        graph = self._program_of(node)
        here, reached = self.own_lines.of(node.source), set(node.outputs)
        for each in graph.nodes:
            if here is not None and each.source is not None and any(value in reached for value in each.operands()):
                beside = (s for s in each.source.outwards() if (s.file, s.function) == (here.file, here.function))
                line = next(beside, self.own_lines.of(each.source))
                if line is not None and line.place != here.place:
                    return line
                reached.update(each.outputs)
        return None

    def _stopped(self, path: str, unknown: Unknown) -> Finding:
        if unknown.reason == astray.REASON:
            return self._located("unexplained-output", path, f"{path}: {UNRELATED}", unknown.reason)
        return self._located("relation-lost", path, f"{path}: {UNRELATED}", f"it has no description: {unknown.reason}")

    def _infer(self, path: str, whole: Value, output: Held) -> Relation | Finding:
        sizes = [int(size) for size in whole.shape]
        no_parts: Summands | None = None
        for placements in self.relator.candidates(sizes, output):
            if self.relator.holds(whole, output, placements):
                held = self.relator.summands(output, placements, stated=False)
                if held is Summands.PARTS:
                    return relation_of(path, placements, output, self._type(path))
                no_parts = no_parts or (held if held is not Summands.UNKNOWN else None)
        arrangement = arranged(self.relator, whole, output) or padded(self.relator, whole, output)
        if arrangement is not None:
            return arranged_relation(path, arrangement)
        if no_parts is not None:
            return self._no_parts(path, no_parts)
        difference = self._difference(path, whole, output)
        if difference is None:
            return self._located("unexplained-output", path, f"{path}: {UNRELATED}", UNEXPLAINED)
        return self._located("unexplained-output", path, difference)

    def _no_parts(self, path: str, held: Summands) -> Finding:
        """A sum over ranks that is the sequential value, though the ranks hold no parts of it."""
        self.proof.no_parts[path] = kind = "scaled-copies" if held is Summands.COPIES else "unexplained-output"
        message = f"{path}: the ranks hold copies that are scaled, and only their sum is the sequential value"
        if held is Summands.CANCELLING:
            message = f"{path}: the ranks hold no parts of it: what they hold adds up to it, as some take away what others add"
        return self._at_output(kind, path, message, self._holding(path))

    def _holding(self, path: str) -> tuple[TensorLayout, ...]:
        """How the ranks hold an output, up to a factor."""
        for number, (stream, _) in enumerate(self.found.streams):
            tensor = stream.graph.outputs.get(path)
            whole = self.sequential.outputs[path]
            holding = None if tensor is None else self.lister.holding(number, tensor, path, whole)
            if holding is not None:
                return (holding,)
        return ()

    def _placed(self, path: str, output: Held, placements: Placements, role: str) -> TensorLayout:
        return TensorLayout(path, *self._type(path), output.mesh, output.order, placements, role=role)

    def _type(self, path: str) -> tuple[str, tuple[int, ...]]:
        tensor = self.sequential.outputs[path]
        assert tensor is not None
        return tensor.dtype, tensor.shape

    def _difference(self, path: str, whole: Value, output: Held) -> str | None:
        """How an output differs, where that is known."""
        factor = self.relator.factor(whole, output)
        if factor is not None:
            return f"{path}: {scale_in_words(factor[0], self.mesh)}"
        return self._of_another_shape(path, whole, output)

    def _of_another_shape(self, path: str, whole: Value, output: Held) -> str | None:
        """What a rank holds, where its shape alone shows that it is no part of the output."""
        sizes = [int(size) for size in whole.shape]
        for part in output.parts:
            held = [at_lane(size, 0) for size in part.value.shape]
            if len(held) != len(sizes) or any(mine > size for mine, size in zip(held, sizes, strict=True)):
                return f"{path}: rank {part.ranks[0]} holds a tensor of shape {held}, which is no part of one of shape {sizes}"
        return None

    def _as_expected(self, path: str, whole: Value, output: Held, expectation: Expectation) -> Relation | Finding:
        if expectation.placements is not None:
            placements = on_mesh(expectation.placements, output.mesh)
            sizes = [int(size) for size in whole.shape]
            if self.relator.fits(sizes, output, placements) and self.relator.holds(whole, output, placements):
                held = self.relator.summands(output, placements, stated=True)
                if held is Summands.UNKNOWN:
                    detail = "whether the ranks hold true parts is too hard to tell"
                    return self._located("relation-lost", path, f"{path}: {UNRELATED}", detail)
                if held is not Summands.PARTS:
                    return self._no_parts(path, held)
                return replace(relation_of(path, placements, output, self._type(path)), note=None)
        elif expectation.graphs is not None and self._follows(whole, output, expectation.graphs):
            return Relation(path, f"{path} is as {expectation.text} says, on every rank")
        if not self.locate:
            return Finding("unexpected-relation", f"{path} is not as {expectation.text} says")
        other = self._infer(path, whole, output)
        if not isinstance(other, Relation):
            return other
        message = f"{other.text.replace('   ', ' ')}, but {expectation.text} is expected"
        if other.arrangement is not None:
            return self._located("unexpected-relation", path, message)
        holdings = []
        if other.placed is not None:
            if summed := [output.mesh.names[axis] for axis in partial_axes(other.placed)]:
                message += f": the sum over axis {', '.join(summed)} is missing"
            holdings.append(self._placed(path, output, other.placed, "held"))
        if expectation.placements is not None:
            holdings.append(self._placed(path, output, expectation.placements, "expected"))
        return self._at_output("unexpected-relation", path, message, tuple(holdings))

    def _at_output(self, kind: str, path: str, message: str, holdings: tuple[TensorLayout, ...] = ()) -> Finding:
        """A finding about a value that is right in itself: at the operations that make it."""
        graph = next(each.graph for each in self.world.classes if each.graph.outputs.get(path) is not None)
        after, before = self.makers.of(graph, path), self.makers.of(self.sequential, path)
        return Finding(
            kind,
            message,
            sequential=before.source if before else None,
            distributed=self.own_lines.at(after) if after else None,
            phase=None if after is None else "backward" if after.backward else "forward",
            holdings=holdings,
        )

    def _follows(self, whole: Value, output: Held, graphs: Sequence[Graph | None]) -> bool:
        """Whether each rank holds what code makes of the sequential output."""
        for part in output.parts:
            for lane, rank in enumerate(part.ranks):
                graph = graphs[rank]
                if graph is None:
                    return False
                local = Interpreter(self.found.table, Lemmas(self.found.lemmas.rows)).run_graph(graph, {FULL: whole}, LOCAL)
                mine = taken(self.found.table, part.value, np.array([lane], dtype=np.int64))
                if not isinstance(local, Value) or not self.relator.equal(local, mine):
                    return False
        return True


class _Makers:
    """By graph, which operation makes which value."""

    def __init__(self) -> None:
        self._known: dict[int, dict[Tensor, Node]] = {}

    def of(self, graph: Graph, path: str) -> Node | None:
        """The operation that an output comes from; moves and communication that only pass it on are passed over."""
        made = self._known.get(id(graph))
        if made is None:
            made = self._known[id(graph)] = {output: node for node in graph.nodes for output in node.outputs}
        tensor = graph.outputs.get(path)
        while tensor is not None and tensor in made:
            node = made[tensor]
            if name_of(node.op) not in RESHAPES:
                return node
            tensor = next(node.operands(), None)
        return None
