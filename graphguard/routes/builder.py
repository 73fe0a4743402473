"""Nodes in the place of one node: slices, concatenations, sums, each with the line of what it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch

from graphguard.graph.ir import Arg, Node, Symbol, Value

Box = Mapping[int, tuple[int, int]]  # by dim, from where to where
Leaf = Callable[[torch.Tensor, Box], Value]


class Builder:
    """Appends nodes to a list. What changes nothing is not written."""

    def __init__(self, nodes: list[Node], next_id: int):
        self._nodes, self._next = nodes, next_id
        self._here: Node | None = None

    def stand_for(self, node: Node) -> None:
        """What is built from now on has the line of this node."""
        self._here = node

    def fresh(self, shape: Sequence[int], dtype: str) -> Value:
        self._next += 1
        return Value(self._next, tuple(shape), dtype)

    def call(self, op: str, args: tuple[Arg, ...], shape: Sequence[int], dtype: str, creates: bool = False) -> Value:
        assert self._here is not None
        made, kwargs = self.fresh(shape, dtype), {"dtype": Symbol("dtype", dtype)} if creates else {}
        self._nodes.append(Node(op, args, kwargs, (made,), self._here.source, self._here.backward))
        return made

    def full(self, shape: Sequence[int], number: bool | int | float, dtype: str) -> Value:
        return self.call("aten.full.default", (tuple(shape), number), shape, dtype, creates=True)

    def zeros(self, shape: Sequence[int], dtype: str) -> Value:
        return self.full(shape, False if dtype == "bool" else 0, dtype)

    def empty(self, shape: Sequence[int], dtype: str) -> Value:
        return self.call("aten.empty.memory_format", (tuple(shape),), shape, dtype, creates=True)

    def view(self, x: Value, shape: Sequence[int]) -> Value:
        return x if x.shape == tuple(shape) else self.call("aten.view.default", (x, tuple(shape)), shape, x.dtype)

    def expand(self, x: Value, shape: Sequence[int]) -> Value:
        return x if x.shape == tuple(shape) else self.call("aten.expand.default", (x, tuple(shape)), shape, x.dtype)

    def cut(self, x: Value, dim: int, low: int, high: int) -> Value:
        if (low, high) == (0, x.shape[dim]):
            return x
        shape = (*x.shape[:dim], high - low, *x.shape[dim + 1 :])
        return self.call("aten.slice.Tensor", (x, dim, low, high), shape, x.dtype)

    def box(self, x: Value, box: Box) -> Value:
        for dim, (low, high) in box.items():
            x = self.cut(x, dim, low, high)
        return x

    def joined(self, parts: Sequence[Value], dim: int) -> Value:
        full = [part for part in parts if part.shape[dim]] or [parts[0]]
        if len(full) == 1:
            return full[0]
        shape = (*full[0].shape[:dim], sum(part.shape[dim] for part in full), *full[0].shape[dim + 1 :])
        return self.call("aten.cat.default", (tuple(full), dim), shape, full[0].dtype)

    def add(self, a: Value, b: Value) -> Value:
        return self.call("aten.add.Tensor", (a, b), a.shape, a.dtype)

    def product(self, a: Value, b: Value) -> Value:
        return self.call("aten.mm.default", (a, b), (a.shape[0], b.shape[1]), a.dtype)

    def in_blocks(self, data: torch.Tensor, dims: Sequence[int], leaf: Leaf, box: Box | None = None) -> Value:
        """A tensor put together of blocks, in each of which the numbers do not change along `dims`. `leaf` makes a block of its
        numbers, with one element along these dims, and of where it lies."""
        box = box or {}
        if not dims:
            return leaf(data, box)
        dim, *others = dims
        parts = [
            self.in_blocks(data.narrow(dim, low, 1), others, leaf, {**box, dim: (low, high)}) for low, high in runs(data, dim)
        ]
        return self.joined(parts, dim)

    def numbers(self, data: torch.Tensor, dtype: str) -> Value:
        """Known numbers as blocks of equal ones: a constant would be one opaque tensor."""

        def leaf(block: torch.Tensor, box: Box) -> Value:
            return self.full([box[dim][1] - box[dim][0] for dim in range(data.dim())], block.item(), dtype)

        return self.in_blocks(data, range(data.dim()), leaf) if data.numel() else self.zeros(data.shape, dtype)


def runs(data: torch.Tensor, dim: int) -> Iterator[tuple[int, int]]:
    """Neighbours along a dim that are equal everywhere else."""
    size = data.shape[dim]
    rows = data.movedim(dim, 0).reshape(size, -1)
    edges = [0, *(((rows[1:] != rows[:-1]).any(1)).nonzero().flatten() + 1).tolist(), size]
    yield from pairwise(edges)
