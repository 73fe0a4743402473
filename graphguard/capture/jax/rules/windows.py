"""What gather and scatter share: where windows begin, whether they lie inside, and which element each position is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphguard.capture.jax.known_arrays import Known
from graphguard.capture.jax.lowering import Lowering
from graphguard.graph.ir import Value


@dataclass(frozen=True)
class Windows:
    """Parts of an operand, one for each place of a batch.

    sizes: of a window, by dim of the operand.
    mapped: the dims whose starts are data, as the components of an index are ordered.
    gone: dims of the operand that a window does not have. rows: dims that run along with a dim of the batch, and which one.
    batch, window: which dims of the result (or of the update) are the batch's, and which are the window's, in order.
    """

    sizes: tuple[int, ...]
    mapped: tuple[int, ...]
    gone: tuple[int, ...]
    rows: dict[int, int]
    batch: tuple[int, ...]
    window: tuple[int, ...]

    @property
    def kept(self) -> list[int]:
        return [dim for dim in range(len(self.sizes)) if dim not in self.gone and dim not in self.rows]

    def is_rows(self, shape: Sequence[int]) -> bool:
        """Whether each window is all elements at one position of one dim."""
        return len(self.mapped) == 1 and self.mapped == self.gone and not self.rows and all(
            self.sizes[dim] == shape[dim] for dim in self.kept)  # fmt: skip

    def is_elements(self) -> bool:
        """Whether each window is one element of a row that belongs to its place in the batch."""
        return len(self.mapped) == 1 and self.mapped == self.gone and len(self.rows) + 1 == len(self.sizes)


def components(low: Lowering, indices: Any) -> list[Any]:
    """The starts, one tensor for each component of the indices, each of the batch's shape."""
    if isinstance(indices, Known):
        return [Known(indices.array[..., place]) for place in range(indices.shape[-1])]
    count, shape = indices.shape[-1], list(indices.shape[:-1])
    if count == 1:
        return [low.cast(low.view(indices, shape), "int64")]
    node = low.build.made.get(indices)
    parts: list[Value] = [low.build.aten("select.int", indices, len(shape), place) for place in range(count)]
    if node is not None and node.op == "aten.cat.default" and node.args[1] == len(shape):
        joined = node.args[0]
        if isinstance(joined, tuple) and len(joined) == count:
            parts = [low.view(each, shape) for each in joined if isinstance(each, Value)]
    return [low.cast(each, "int64") for each in parts]


def unwrapped(low: Lowering, index: Value, most: int) -> Value:
    """An index that is known to lie inside, without what jnp does to negative ones if it is none."""
    plain = from_the_front(low, index)
    return plain if low.intervals.of(plain).within(0, most) else index


def from_the_front(low: Lowering, index: Value) -> Value:
    """`where(i < 0, i + n, i)`, which jnp makes of every index i, as i. It is the same where i is not negative."""
    made, root = low.build.made, index
    while root in made and made[root].op in ("aten.view.default", "aten._to_copy.default"):
        root = made[root].args[0]  # type: ignore[assignment]
    node = made.get(root)
    if node is None or node.op != "aten.where.self":
        return index
    mask, _, plain = node.args
    test = made.get(mask)  # type: ignore[arg-type]
    if test is None or test.op != "aten.lt.Scalar" or test.args != (plain, 0) or not isinstance(plain, Value):
        return index
    return low.cast(low.view(plain, index.shape), "int64")


def all_known(starts: Sequence[Any]) -> bool:
    """Whether there is one window, and where it begins is known."""
    return all(isinstance(start, Known) and start.size == 1 for start in starts)


def inside(low: Lowering, index: Value, most: int) -> tuple[Value, Value]:
    """Where an index lies inside; and the index, which may be another one elsewhere. `where(m, i, n)` with an n that is outside
    says so itself."""
    root, node = index, low.build.made.get(index)
    while node is not None and node.op in ("aten.view.default", "aten._to_copy.default"):
        root = node.args[0]  # type: ignore[assignment]
        node = low.build.made.get(root)
    if node is not None and node.op == "aten.where.self":
        mask, *cases = node.args
        for holds, own, other in ((True, cases[0], cases[1]), (False, cases[1], cases[0])):
            assert isinstance(mask, Value) and isinstance(own, Value) and isinstance(other, Value)
            elsewhere = low.intervals.of(other)
            if (elsewhere.low > most or elsewhere.high < 0) and mask.shape == own.shape == root.shape:
                chosen = mask if holds else low.build.aten("bitwise_not", mask)
                plain = low.cast(low.view(own, index.shape), "int64")
                chosen = low.view(chosen, index.shape)
                if low.intervals.under(own, mask, holds).within(0, most):
                    return chosen, plain
                return low.build.aten("bitwise_and.Tensor", chosen, _between(low, plain, most)), plain
    return _between(low, index, most), index


def _between(low: Lowering, index: Value, most: int) -> Value:
    return low.build.aten("bitwise_and.Tensor", low.build.aten("ge.Scalar", index, 0), low.build.aten("le.Scalar", index, most))


def positions(low: Lowering, windows: Windows, starts: Sequence[Value], shape: Sequence[int]) -> tuple[Value, ...]:
    """By dim of the operand, the position of each element of a result of some shape."""
    rank, kept = len(shape), windows.kept

    def laid(x: Value, dims: Sequence[int]) -> Value:
        sizes = [1] * rank
        for dim, size in zip(dims, x.shape, strict=True):
            sizes[dim] = size
        return low.view(x, sizes)

    found = []
    for dim, size in enumerate(windows.sizes):
        parts = []
        if dim in windows.rows:
            at = windows.batch[windows.rows[dim]]
            parts.append(laid(low.build.aten("arange", shape[at], dtype="int64"), [at]))
        if dim in windows.mapped:
            parts.append(laid(starts[windows.mapped.index(dim)], windows.batch))
        if dim in kept and (size > 1 or not parts):
            parts.append(laid(low.build.aten("arange", size, dtype="int64"), [windows.window[kept.index(dim)]]))
        if not parts:
            parts.append(
                laid(low.build.aten("arange", 1, dtype="int64"), [0]) if rank else low.full([], Known(np.zeros(1, np.int64)))
            )
        found.append(parts[0] if len(parts) == 1 else low.build.aten("add.Tensor", *parts))
    return tuple(found)


def lined_up(low: Lowering, windows: Windows, x: Value) -> Value:
    """Of single elements: a tensor of the batch's shape as the operand's dims lie, with one dim for what is looked up."""
    (dim,) = windows.mapped
    rows = [windows.rows[each] for each in sorted(windows.rows)]
    kept = [place for place in range(len(x.shape)) if place not in rows]
    if not kept:
        x = low.permuted(x, rows)
        return low.view(x, [*x.shape[:dim], 1, *x.shape[dim:]])
    assert len(kept) == 1
    return low.permuted(x, [*rows[:dim], *kept, *rows[dim:]])
