"""The relation at each operation, for people: which sequential tensor a rank's tensor is, and how the ranks hold it.

Nothing of a proof depends on it, and it is worked out only where somebody looks.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphguard.engine.interpret import Interpretation
from graphguard.engine.relate.localise import Localiser
from graphguard.engine.relate.outputs import Held, Relator, held
from graphguard.engine.terms.term import Undescribed, Value
from graphguard.engine.terms.unknown import Environment, Unknown
from graphguard.graph.ir import Graph, Mesh, Node
from graphguard.graph.ir import Value as Tensor
from graphguard.graph.listing import ListedProgram, in_words, listed
from graphguard.graph.placement import REPLICATE, SUM, Placements
from graphguard.graph.rank_class import RankClass
from graphguard.graph.tensor_layout import TensorLayout

MOST_COPIES = 2  # of a sequential tensor that are named beside it


class Lister:
    def __init__(self, found: Interpretation, sequential: Graph, mesh: Mesh, relator: Relator, localiser: Localiser):
        self.found, self.sequential, self.mesh = found, sequential, mesh
        self.relator, self.localiser = relator, localiser
        self.stops = found.table.stops
        self.compared = 0  # terms of descriptions, so far
        self._operands: dict[Node, tuple[TensorLayout | None, ...]] = {}
        self._holders: dict[str, list[str]] = {}  # of each sequential tensor, by its name

    # ------------------------------------------------------------------ one tensor
    def holding(self, number: int, tensor: Tensor, name: str, whole: Tensor | None = None) -> TensorLayout | None:
        """How the ranks of a stream hold a sequential tensor: the one that their tensor is part of, unless it is given."""
        self.compared += 1
        stream, environment = self.found.streams[number]
        value = environment.get(tensor)
        if not isinstance(value, Value):
            return None
        output = held(self.mesh, [(stream.members, value)])
        scaled: TensorLayout | None = None
        for each in [whole] if whole is not None else self._partners(number, tensor, value):
            described = self.found.sequential.get(each)
            found = self._placements(described, output) if output is not None and isinstance(described, Value) else None
            if output is not None and found is not None:
                holding = TensorLayout(name, each.dtype, each.shape, output.mesh, output.order, *found, of=str(each))
                if holding.factor is None:
                    return holding
                scaled = scaled or holding
        return scaled

    def _partners(self, number: int, tensor: Tensor, value: Value) -> list[Tensor]:
        """Sequential tensors that a rank's tensor may be part of, the likeliest first."""
        related = self.localiser.related(number, tensor)
        if related is None or related.id < 0:
            return []
        return list(dict.fromkeys([related, *self.localiser.relatives.alike(value)]))

    def _placements(self, whole: Value, output: Held) -> tuple[Placements, str | None] | None:
        try:
            fitting = list(self.relator.candidates([int(size) for size in whole.shape], output))
            sums = [placements for placements in fitting if SUM in placements]
            for placements in fitting[: len(fitting) - len(sums)]:
                if self._holds(whole, output, placements):
                    return placements, None
            scaled = self.relator.factor(whole, output)  # before sums, which N copies of y/N have too
            if scaled is not None:
                return scaled[1], str(scaled[0])
            chosen = next((placements for placements in sums if self._holds(whole, output, placements)), None)
        except Undescribed:
            return None
        return None if chosen is None else (chosen, None)

    def _holds(self, whole: Value, output: Held, placements: Placements) -> bool:
        self.compared += len(whole.terms) + sum(len(part.value.terms) for part in output.parts)
        return self.relator.holds(whole, output, placements)

    def operands(self, node: Node) -> tuple[TensorLayout | None, ...]:
        """How the ranks hold what an operation of theirs reads, by operand; None where that has no simple form. A proof
        does not wait for it long."""
        if node not in self._operands:
            self._operands[node] = () if self.stops.over("pictures", self.compared) else self._held_by(node)
        return self._operands[node]

    def _held_by(self, node: Node) -> tuple[TensorLayout | None, ...]:
        for number, (stream, _) in enumerate(self.found.streams):
            if any(each is node for each in stream.graph.nodes):
                names = _Names(stream.graph)
                operands = dict.fromkeys(node.operands())
                holdings = [self.holding(number, tensor, names(tensor)) for tensor in operands]
                return tuple(each if each is not None and each.factor is None else None for each in holdings)
        return ()

    # ------------------------------------------------------------------ all of them
    def programs(self) -> list[ListedProgram]:
        self.compared = 0
        ranks = []
        for number, (stream, environment) in enumerate(self.found.streams):
            relate = _OfRanks(self, number, stream, environment)
            ranks.append(listed(in_words(stream.members), stream.members, stream.graph, relate))
        return [listed("sequential", (), self.sequential, self._of_sequential), *ranks]

    def late(self) -> tuple[str, str] | None:
        """What is said of an operation after too many."""
        self.compared += 1
        if not self.stops.over("listed", self.compared):
            return None
        return "unknown", f"not looked at: the program is large; `{self.stops.stop('listed', None).retry}`"

    def _of_sequential(self, node: Node) -> tuple[str, str]:
        for tensor in node.outputs:
            described = self.found.sequential.get(tensor)
            if isinstance(described, Unknown):
                return "undescribed", described.reason
            if str(tensor) in self._holders:
                holders = self._holders[str(tensor)]
                more = len(holders) - MOST_COPIES
                text = "; ".join(holders[:MOST_COPIES]) + (f"; and {more} more" if more > 0 else "")
                return "related", text
        late = self.late()
        if late is not None:
            return late
        if node.outputs and all(self.localiser.covered(tensor) for tensor in node.outputs):
            return "related", "the ranks hold it, or parts of it"
        return "unrelated", "no tensor of the ranks is a copy, a tile or a summand of it"

    def held_by(self, whole: str, text: str) -> None:
        self._holders.setdefault(whole, []).append(text)


class _OfRanks:
    """The relation at each operation of one stream."""

    def __init__(self, lister: Lister, number: int, stream: RankClass, environment: Environment):
        self.lister, self.number, self.stream, self.environment = lister, number, stream, environment

    def __call__(self, node: Node) -> tuple[str, str]:
        if not node.outputs:
            return "unknown", ""
        tensor = node.outputs[0]
        described = self.environment.get(tensor)
        if isinstance(described, Unknown):
            return "undescribed", described.reason
        late = self.lister.late()
        if late is not None:
            return late
        related = self.lister.localiser.related(self.number, tensor)
        if related is None:
            return "unrelated", "no copy, tile or summand of a sequential tensor"
        if related.id < 0:
            return "related", "numbers that depend on no input"
        return "related", self._words(tensor, related)

    def _words(self, tensor: Tensor, whole: Tensor) -> str:
        holding = self.lister.holding(self.number, tensor, str(tensor))
        who = in_words(self.stream.members)
        if holding is None:
            self.lister.held_by(str(whole), f"part of it is {tensor} on {who}")
            return f"part of sequential {whole}, or of a multiple of it"
        factor = "" if holding.factor is None else f"{holding.factor} times "
        self.lister.held_by(holding.of, f"{factor}{holding.type} is {tensor} on {who}")
        return f"{factor}sequential {holding.of} as {holding.type}"


def telling(holdings: Sequence[TensorLayout | None]) -> tuple[TensorLayout, ...]:
    """Those worth a picture: summands first, then tiles; none if all are whole on every rank."""
    known = [each for each in holdings if each is not None]
    if not any(set(each.placements) - {REPLICATE} for each in known):
        return ()
    return tuple(sorted(known, key=lambda each: (not each.summed_axes, set(each.placements) == {REPLICATE})))


class _Names:
    """What a rank's tensors are called in print."""

    def __init__(self, graph: Graph):
        self.inputs = {tensor: name for name, tensor in graph.inputs.items()}
        self.makers = {tensor: node for node in graph.nodes for tensor in node.outputs}

    def __call__(self, tensor: Tensor) -> str:
        if tensor in self.inputs:
            return self.inputs[tensor]
        maker = self.makers.get(tensor)
        if maker is None:
            return f"the constant {tensor}"
        where = f" of line {maker.source.line}" if maker.source else ""
        return f"the {short(maker.op)}{where}"


def short(operator: str) -> str:
    """`aten.mm.default` as `mm`."""
    return operator.split(".")[1] if operator.count(".") else operator
