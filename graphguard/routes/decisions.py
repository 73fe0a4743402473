"""Where programs decide by values: the first tensors of whole numbers on the way to what is read.

What a program reads follows by computation from its *decisions*: whole numbers made from numbers that are free (the indices of
`topk`, a comparison), whole-number inputs, and what other ranks send. Nothing else is assumed of a path. A free number itself
decides nothing: no other input has it, so a program that reads one has no path to speak of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphguard.aten.grouped import GROUPED, ends_of
from graphguard.aten.kernels import Kernels
from graphguard.errors import CaptureError
from graphguard.graph.ir import Graph, Node, Value
from graphguard.graph.matching import Joint
from graphguard.routes.evaluated import is_whole

# Only the shape of what they are given counts.
SHAPE_ONLY = {f"aten.{name}.default" for name in ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones",
                                                  "new_full", "new_empty")}  # fmt: skip


@dataclass(frozen=True)
class Flow:
    """Of a graph: where each value is made, which values depend on inputs, and which of those are free."""

    makers: Mapping[Value, Node]
    names: Mapping[Value, str]
    varying: frozenset[Value]
    free: frozenset[Value]

    @staticmethod
    def of(graph: Graph) -> Flow:
        varying = set(graph.inputs.values())
        free = {value for value in varying if not is_whole(value)}
        for node in graph.nodes:
            if node.op in SHAPE_ONLY:
                continue
            if node.communicates or any(value in varying for value in node.operands()):
                varying.update(node.outputs)
            if node.communicates or any(value in free for value in node.operands()):
                free.update(value for value in node.outputs if not is_whole(value))
        makers = {value: node for node in graph.nodes for value in node.outputs}
        return Flow(makers, {value: name for name, value in graph.inputs.items()}, frozenset(varying), frozenset(free))

    def decides(self, value: Value) -> bool:
        """Whether a value is whole numbers that are made from free ones."""
        node = self.makers.get(value)
        if node is None or node.communicates or not is_whole(value) or value not in self.varying:
            return False
        return any(operand in self.free for operand in node.operands())

    def candidates(self) -> list[Value]:
        return [value for value in self.makers if self.decides(value)]


@dataclass
class Decided:
    """Of one program, what its reads rest on: decisions, whole-number inputs, and what is received, each in its order."""

    decisions: dict[Value, None] = field(default_factory=dict)
    inputs: dict[str, Value] = field(default_factory=dict)
    received: dict[Value, Node] = field(default_factory=dict)


def decided_alone(graph: Graph, reads: Sequence[Value]) -> Decided:
    """Of a program that does not communicate."""
    search = _Search([graph], None)
    search.follow(0, reads)
    return search.found[0]


def decided_together(joint: Joint, reads: Sequence[Sequence[Value]]) -> list[Decided]:
    """Of the ranks: what one of them receives rests on what the others send, whether or not they read it themselves."""
    search = _Search(joint.graphs, joint)
    for rank, values in enumerate(reads):
        search.follow(rank, values)
    return search.found


class _Search:
    def __init__(self, graphs: Sequence[Graph], joint: Joint | None):
        self.joint = joint
        self.flows = [Flow.of(graph) for graph in graphs]
        self.found = [Decided() for _ in graphs]
        self._seen: list[set[Value]] = [set() for _ in graphs]
        for rank, graph in enumerate(graphs):
            for node in graph.nodes:
                self.follow(rank, _positions(node))

    def follow(self, rank: int, reads: Sequence[Value]) -> None:
        pending = [(rank, value) for value in reads]
        while pending:
            at, value = pending.pop()
            if value in self._seen[at] or value not in self.flows[at].varying:
                continue
            self._seen[at].add(value)
            pending += self._behind(at, value)

    def _behind(self, rank: int, value: Value) -> list[tuple[int, Value]]:
        flow, found = self.flows[rank], self.found[rank]
        node = flow.makers.get(value)
        if value in flow.free:
            raise CaptureError(_free(value, node))
        if node is None:
            found.inputs[flow.names[value]] = value
        elif node.communicates:
            found.received[value] = node
            match = None if self.joint is None else self.joint.matched(node)
            return [] if match is None else [(r, v) for r, each in match.nodes.items() for v in each.operands()]
        elif flow.decides(value):
            found.decisions[value] = None
        else:
            return [(rank, operand) for operand in node.operands()]
        return []


def _positions(node: Node) -> list[Value]:
    """The whole numbers that an operator reads by itself."""
    given = ends_of(node.args, node.kwargs) if node.op == GROUPED else None
    return [given] if isinstance(given, Value) else []


def _free(value: Value, node: Node | None) -> str:
    where = "an input" if node is None else f"{name_of_operator(node.op)} at {node.source}"
    return (
        f"the program reads a number ({value.type}) that {where} makes of its inputs, and that no two inputs need to have in "
        "common; only whole numbers and truths (topk, a comparison) can say which way a program goes, so keep it in a tensor"
    )


# ---------------------------------------------------------------------- what follows
def determined(joint: Joint, known: Sequence[set[Value]], received: Sequence[Mapping[Value, Node]]) -> list[set[Value]]:
    """By rank, the values that are the same for all inputs on which the `known` ones are: those that follow from them, and what
    is received of such."""
    sure = [{*values, *graph.constants} for values, graph in zip(known, joint.graphs, strict=True)]
    before = -1
    while (now := sum(map(len, sure))) > before:
        before = now
        for graph, here in zip(joint.graphs, sure, strict=True):
            for node in graph.nodes:
                if _follows(node, here):
                    here.update(node.outputs)
        for rank, nodes in enumerate(received):
            for value, node in nodes.items():
                match = joint.matched(node)
                if match is not None and all(v in sure[r] for r, each in match.nodes.items() for v in each.operands()):
                    sure[rank].add(value)
    return sure


def _follows(node: Node, sure: set[Value]) -> bool:
    if node.communicates or node.op.startswith("gg."):
        return False
    if node.op in SHAPE_ONLY:
        return "empty" not in node.op
    return all(value in sure for value in node.operands()) and not Kernels.function(node.op)[1].random


# ---------------------------------------------------------------------- words
def name_of_operator(op: str) -> str:
    return op.split(".")[1] if op.count(".") >= 1 else op
