"""Where a relation breaks: the first operation of each program with related inputs and an unrelated result.

A tensor of a rank is related if it is equal to a tensor of the sequential program, a tile of one, a summand, or a multiple.
Values that are never related themselves but lead to related ones (a shift of a softmax, a partial maximum) are harmless and
are not named.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial

from graphguard.engine.interpret import Interpretation
from graphguard.engine.relate.outputs import Held, OutputPart, Relator
from graphguard.engine.relate.relatives import Relatives, is_plain
from graphguard.engine.terms.term import Value
from graphguard.graph.ir import Graph, Mesh, Node, Source, is_unwritten
from graphguard.graph.ir import Value as Tensor
from graphguard.graph.limits import Stops


@dataclass(frozen=True)
class Break:
    """An operation after which nothing is related any more."""

    node: Node
    tensor: Tensor


@dataclass(frozen=True)
class Place:
    """Where the relation of an output breaks, in both programs, and how the value there differs if that is known."""

    sequential: Node | None
    distributed: Node | None
    words: str | None = None
    others: tuple[Source, ...] = ()  # where the operands of the distributed operation come from


class Localiser:
    def __init__(self, found: Interpretation, sequential: Graph, mesh: Mesh, relator: Relator):
        self.found, self.sequential, self.mesh, self.relator = found, sequential, mesh, relator
        self.stops = found.table.stops
        self.relatives = Relatives(relator, found.sequential, mesh, parts=True)
        self._related: dict[tuple[int, Tensor], Tensor | None] = {}
        self._covered: dict[Tensor, bool] = {}

    @cached_property
    def _of_ranks(self) -> list[Relatives]:
        return [Relatives(self.relator, environment, self.mesh) for _, environment in self.found.streams]

    def place(self, path: str) -> Place:
        """Where the relation of an output breaks."""
        after = self._break_of_ranks(path)
        before = self._break_of_sequential(path)
        words = self._words(after, before)
        others = self._origins(after.node) if after else ()
        return Place(before.node if before else None, after.node if after else None, words, others)

    def _origins(self, node: Node) -> tuple[Source, ...]:
        """The lines on which the operands of a rank's operation were made, the latest first."""
        graph = next(s.graphs[0] for s, _ in self.found.streams if any(n is node for n in s.graphs[0].nodes))
        maker = {tensor: each for each in graph.nodes for tensor in each.outputs}
        order = {id(each): place for place, each in enumerate(graph.nodes)}
        lines: list[Source] = []
        pending = deque(sorted((maker[t] for t in node.operands() if t in maker), key=lambda n: -order[id(n)]))
        seen: set[int] = set()  # a line on which much is done, such as that of a backward pass, has very many ways through it
        while pending and len(lines) < 3:
            each = pending.popleft()
            if id(each) in seen:
                continue
            seen.add(id(each))
            if each.source is not None and each.source != node.source and each.source not in lines:
                lines.append(each.source)
            elif each.source == node.source:
                pending += [maker[t] for t in each.operands() if t in maker]
        return tuple(lines)

    # ------------------------------------------------------------------ the ranks
    def _break_of_ranks(self, path: str) -> Break | None:
        for number, (stream, _) in enumerate(self.found.streams):
            output = stream.graphs[0].outputs.get(path)
            if output is not None and self.related(number, output) is None:
                graph = stream.graphs[0]
                return _first_break(self.stops, graph, output, partial(self._is_related, number))
        return None

    def related(self, number: int, tensor: Tensor) -> Tensor | None:
        """The sequential tensor that a rank's tensor is a copy, a tile or a summand of."""
        key = (number, tensor)
        if key not in self._related:
            stream, environment = self.found.streams[number]
            self._related[key] = self.relatives.relation(stream, environment.get(tensor))
        return self._related[key]

    def _is_related(self, number: int, tensor: Tensor) -> bool:
        return self.related(number, tensor) is not None

    # ------------------------------------------------------------------ the sequential program
    def _break_of_sequential(self, path: str) -> Break | None:
        output = self.sequential.outputs.get(path)
        if output is None or self.covered(output):
            return None
        return _first_break(self.stops, self.sequential, output, self.covered)

    def covered(self, tensor: Tensor) -> bool:
        """Whether some tensor of the ranks is a copy, a tile or a summand of a sequential one."""
        if tensor not in self._covered:
            self._covered[tensor] = self._is_covered(tensor)
        return self._covered[tensor]

    def _is_covered(self, tensor: Tensor) -> bool:
        value = self.found.sequential.get(tensor)
        if not isinstance(value, Value):
            return False
        if is_plain(value):
            return True
        for number, relatives in enumerate(self._of_ranks):
            for candidate in relatives.alike(value):
                if self.related(number, candidate) is not None:
                    return True
        return False

    # ------------------------------------------------------------------ in words
    def _words(self, after: Break | None, before: Break | None) -> str | None:
        if after is None or before is None:
            return None
        whole = self.found.sequential.get(before.tensor)
        for stream, environment in self.found.streams:
            value = environment.get(after.tensor)
            if isinstance(whole, Value) and isinstance(value, Value):
                held = Held(self.mesh, tuple(range(self.mesh.size)), [OutputPart(tuple(stream.ranks), value)])
                if stream.ranks == list(range(self.mesh.size)) and len(value.shape) == len(whole.shape):
                    factor = self.relator.factor(whole, held)
                    if factor is not None and factor[0] != 1:
                        return scale_in_words(factor[0], self.mesh)
        return None


def scale_in_words(factor: Fraction, mesh: Mesh) -> str:
    """How a value differs that is a multiple of the expected one."""
    axes = [(name, size) for name, size in mesh.axes if factor in (size, Fraction(1, size))]
    if len(axes) == 1:  # of several that have the size, none is known to be the one
        name, size = axes[0]
        if factor == size:
            return f"it is {size} times the expected value: counted {size} times over axis {name}"
        return f"it is 1/{size} of the expected value: divided once too often by the size of axis {name}, or not summed"
    return f"it is {factor} times the expected value"


def _first_break(stops: Stops, graph: Graph, output: Tensor, related: Callable[[Tensor], bool]) -> Break | None:
    """The first node, on the way to an output, with related operands and an unrelated result that leads to nothing related."""
    maker = {tensor: node for node in graph.nodes for tensor in node.outputs}
    order = {id(node): place for place, node in enumerate(graph.nodes)}
    lost: dict[Tensor, Node] = {}
    pending = [output]
    while pending and not stops.over("visits", len(lost) + 1):
        tensor = pending.pop()
        if tensor in lost or tensor not in maker or related(tensor):
            continue
        lost[tensor] = maker[tensor]
        pending += maker[tensor].operands()
    breaks = [Break(node, tensor) for tensor, node in lost.items() if not any(operand in lost for operand in node.operands())]
    breaks = [each for each in breaks if not is_unwritten(each.node)] or breaks
    harmful = [each for each in breaks if not _recovers(stops, graph, each.tensor, related)]
    return min(harmful or breaks, key=lambda each: order[id(each.node)], default=None)


def _recovers(stops: Stops, graph: Graph, tensor: Tensor, related: Callable[[Tensor], bool]) -> bool:
    """Whether an unrelated value leads, through other unrelated ones, to a related one."""
    users: dict[Tensor, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        for operand in node.operands():
            users[operand].append(node)
    seen, pending = {tensor}, [tensor]
    while pending and not stops.over("visits", len(seen) + 1):
        for node in users[pending.pop()]:
            for result in node.outputs:
                if result in seen:
                    continue
                if related(result):
                    return True
                seen.add(result)
                pending.append(result)
    return False
