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
        self._ways: dict[int, _Ways] = {}  # by number of the stream
        self._lines: dict[Node, tuple[Source, ...]] = {}

    @cached_property
    def _of_ranks(self) -> list[Relatives]:
        return [Relatives(self.relator, environment, self.mesh) for _, environment in self.found.streams]

    def place(self, path: str) -> Place:
        """Where the relation of an output breaks."""
        after = self._break_of_ranks(path)
        before = self._break_of_sequential(path)
        words = self._words(after, before)
        if after is not None and after.node not in self._lines:
            self._lines[after.node] = self._origins(after.node)
        others = self._lines[after.node] if after is not None else ()
        return Place(before.node if before else None, after.node if after else None, words, others)

    def _origins(self, node: Node) -> tuple[Source, ...]:
        """The lines on which the operands of a rank's operation were made, the latest first."""
        graph = next(s.graph for s, _ in self.found.streams if any(n is node for n in s.graph.nodes))
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
            output = stream.graph.outputs.get(path)
            if output is not None and self.related(number, output) is None:
                if number not in self._ways:
                    self._ways[number] = _Ways(self.stops, stream.graph, partial(self._is_related, number))
                return self._ways[number].first_break(output)
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
        return self._ways_of_sequential.first_break(output)

    @cached_property
    def _ways_of_sequential(self) -> _Ways:
        return _Ways(self.stops, self.sequential, self.covered)

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
                held = Held(self.mesh, tuple(range(self.mesh.size)), [OutputPart(stream.members, value)])
                if stream.lanes == self.mesh.size and len(value.shape) == len(whole.shape):
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


class _Ways:
    """The ways through one program, along what is not related. What one output shows of them is kept for the others."""

    def __init__(self, stops: Stops, graph: Graph, related: Callable[[Tensor], bool]):
        self.stops, self.related = stops, related
        self.maker = {tensor: node for node in graph.nodes for tensor in node.outputs}
        self.order = {id(node): place for place, node in enumerate(graph.nodes)}
        self.users: dict[Tensor, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            for operand in node.operands():
                self.users[operand].append(node)
        self._breaks: dict[Tensor, frozenset[Tensor]] = {}  # before a tensor that is lost
        self._recovers: dict[Tensor, bool] = {}

    def first_break(self, output: Tensor) -> Break | None:
        """The first node, on the way to an output, with related operands and an unrelated result that leads to nothing
        related."""
        tensors = sorted(self._breaks_before(output), key=lambda tensor: (self.order[id(self.maker[tensor])], tensor.id))
        breaks = [Break(self.maker[tensor], tensor) for tensor in tensors]
        breaks = [each for each in breaks if not is_unwritten(each.node)] or breaks
        return next((each for each in breaks if not self.recovers(each.tensor)), breaks[0] if breaks else None)

    def _breaks_before(self, output: Tensor) -> frozenset[Tensor]:
        """Unrelated results of related operands."""
        lost: set[Tensor] = set()
        pending, cut = [output], False
        while pending:
            tensor = pending.pop()
            if tensor in lost or tensor in self._breaks or tensor not in self.maker or self.related(tensor):
                continue
            if self.stops.over("visits", len(lost) + 1):
                cut = True
                break
            lost.add(tensor)
            pending += self.maker[tensor].operands()
        found = dict(self._breaks) if cut else self._breaks  # of what was not visited nothing is known
        for tensor in sorted(lost, key=lambda each: self.order[id(self.maker[each])]):
            before = [found[operand] for operand in self.maker[tensor].operands() if operand in found]
            found[tensor] = frozenset().union(*before) if before else frozenset([tensor])
        return found.get(output, frozenset())

    def recovers(self, tensor: Tensor) -> bool:
        """Whether an unrelated value leads, through other unrelated ones, to a related one."""
        if tensor not in self._recovers:
            self._recovers[tensor] = self._finds_related(tensor)
        return self._recovers[tensor]

    def _finds_related(self, tensor: Tensor) -> bool:
        seen, pending = {tensor}, [tensor]
        while pending and not self.stops.over("visits", len(seen) + 1):
            for node in self.users[pending.pop()]:
                for result in node.outputs:
                    if result in seen or self._recovers.get(result) is False:
                        continue
                    if self._recovers.get(result) or self.related(result):
                        return True
                    seen.add(result)
                    pending.append(result)
        if not pending:  # all that it leads to was seen
            self._recovers.update(dict.fromkeys(seen, False))
        return False
