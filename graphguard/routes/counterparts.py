"""Which decision of the sequential program a rank's decision is a part of.

It is looked for by what the sample shows: the same operator, the same whole numbers, made from the same free numbers. That is
no proof, and a wrong guess is no harm: the prover has to show that the rank decides as that part of the sequential decision
does, and where it does not, nothing is verified.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from graphguard.graph.ir import Graph, Mesh, Node, Value
from graphguard.relation.expectation import FULL, LOCAL
from graphguard.routes.decisions import Flow

_CLOSE = 1e-9  # of numbers in float64 that are the same but for rounding
_MOST_PLACES = 4096
Tensors = Mapping[Value, torch.Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A box of a sequential decision, which is seen in some shape and then in that of the rank."""

    of: Value
    seen_as: Shape
    starts: Shape
    sizes: Shape
    shape: Shape

    def tensor(self, whole: torch.Tensor) -> torch.Tensor:
        found = whole.reshape(self.seen_as)
        for dim, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            found = found.narrow(dim, start, size)
        return found.reshape(self.shape)

    def graph(self, rank: int, mesh: Mesh | None) -> Graph:
        """From the sequential decision to the rank's."""
        at = Value(0, self.of.shape, self.of.dtype)
        graph = Graph(f"what rank {rank} decides", {FULL: at}, mesh=mesh, rank=rank)
        at = _reshaped(graph, at, self.seen_as)
        for dim, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            if size != at.shape[dim]:
                made = Value(at.id + 1, (*at.shape[:dim], size, *at.shape[dim + 1 :]), at.dtype)
                graph.nodes.append(Node("aten.slice.Tensor", (at, dim, start, start + size), {}, (made,)))
                at = made
        graph.outputs[LOCAL] = _reshaped(graph, at, self.shape)
        return graph


def _reshaped(graph: Graph, at: Value, shape: Shape) -> Value:
    if at.shape == shape:
        return at
    made = Value(at.id + 1, shape, at.dtype)
    graph.nodes.append(Node("aten.view.default", (at, shape), {}, (made,)))
    return made


class Counterparts:
    """Of the sequential program's decisions, with the numbers that all tensors have on the sample."""

    def __init__(self, sequential: Graph, values: Tensors):
        self.flow, self._values = Flow.of(sequential), values
        self._candidates = self.flow.candidates()

    def of(self, decision: Value, flow: Flow, values: Tensors) -> Part | None:
        """The part that a rank's decision is, as far as the sample shows."""
        node = flow.makers[decision]
        likely: list[Part] = []
        for candidate in self._candidates:
            its = self.flow.makers[candidate]
            if its.op != node.op or candidate.dtype != decision.dtype or _place(its, candidate) != _place(node, decision):
                continue
            for part in _parts(candidate, decision):
                if torch.equal(part.tensor(self._values[candidate]), values[decision]):
                    if self._is_made_alike(part, its, node, flow, values):
                        return part
                    likely.append(part)
        return likely[0] if likely else None

    def _is_made_alike(self, part: Part, its: Node, node: Node, flow: Flow, values: Tensors) -> bool:
        """Whether the free numbers that both are made from agree at the same place."""
        mine = [value for value in node.operands() if value in flow.free]
        others = [value for value in its.operands() if value in self.flow.free]
        pairs = list(zip(mine, others, strict=False))
        return len(mine) == len(others) and all(_agree(part, self._values[b], values[a]) for a, b in pairs)


def _place(node: Node, value: Value) -> int:
    return node.outputs.index(value)


def _parts(whole: Value, part: Value) -> Iterator[Part]:
    """The boxes of a tensor that may be a part of it: of its dims, of rows and columns, of all elements in a row, of rows that
    are joined dims themselves."""
    views = [*zip(_views(whole.shape), _views(part.shape), strict=True), *_split_rows(whole.shape, part.shape)]
    for seen_as, sizes in dict.fromkeys(views):
        if len(seen_as) != len(sizes) or any(size > full for size, full in zip(sizes, seen_as, strict=True)):
            continue
        places = [_starts(full, size) for full, size in zip(seen_as, sizes, strict=True)]
        if math.prod(map(len, places)) <= _MOST_PLACES:
            yield from (Part(whole, seen_as, starts, sizes, part.shape) for starts in itertools.product(*places))


def _views(shape: Shape) -> list[Shape]:
    rows = (math.prod(shape[:-1]), *shape[-1:])
    return [shape, rows, (math.prod(shape),)]


def _split_rows(whole: Shape, part: Shape) -> Iterator[tuple[Shape, Shape]]:
    """Rows as two dims: of a sequence and a batch that were joined, a rank may have parts of both."""
    if not whole or not part or whole[-1] != part[-1]:
        return
    rows, its = math.prod(whole[:-1]), math.prod(part[:-1])
    for inner in (n for n in range(2, rows) if rows % n == 0):
        for mine in (n for n in range(1, inner) if its % n == 0 and its // n <= rows // inner):
            yield (rows // inner, inner, whole[-1]), (its // mine, mine, part[-1])


def _starts(full: int, size: int) -> list[int]:
    """Where equal pieces begin comes first."""
    if size == full or size == 0:
        return [0]
    pieces = list(range(0, full - size + 1, size))
    return list(dict.fromkeys([*pieces, *range(full - size + 1)]))


def _agree(part: Part, whole: torch.Tensor, mine: torch.Tensor) -> bool:
    """Whether a rank's numbers are those of the whole at a place. They may have dims that the decision has not."""
    if len(part.seen_as) > 2 and part.seen_as != tuple(part.of.shape):
        if whole.numel() % math.prod(part.seen_as[:-1]) or mine.numel() % max(1, math.prod(part.sizes[:-1])):
            return False
        whole, mine = whole.reshape(*part.seen_as[:-1], -1), mine.reshape(*part.sizes[:-1], -1)
    elif part.seen_as != tuple(part.of.shape):
        whole, mine = _as_rows(whole), _as_rows(mine)
    for dim, (full, start, size) in enumerate(zip(part.seen_as, part.starts, part.sizes, strict=True)):
        if size == full:
            continue
        fit = [k for k in range(min(whole.dim(), mine.dim())) if (whole.shape[k], mine.shape[k]) == (full, size)]
        if not fit:
            return False
        whole = whole.narrow(dim if dim in fit else fit[0], start, size)
    return whole.shape == mine.shape and bool(torch.allclose(whole, mine, rtol=_CLOSE, atol=_CLOSE, equal_nan=True))


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(math.prod(tensor.shape[:-1]), *tensor.shape[-1:])
