"""Convolutions: products of weights with windows of a tensor, which may overlap, have gaps, and reach beyond it.

A window at place i has element k of the tensor at `stride · i + dilation · k - padding`. Windows beside each other are a change
of shape, all others a product with `[n = that position]`, which is 0 where it lies outside: the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphguard.engine.terms.term import Undescribed, Value
from graphguard.lemmas.registry import Call, row

PLACES, INSIDE, DIMS = "pqr", "uvw", "xyz"  # labels of windows, of the elements of a window, and of the tensor


@dataclass(frozen=True)
class Windows:
    """One number for each spatial dim."""

    sizes: list[int]
    kernel: list[int]
    places: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int = 1

    @property
    def channels(self) -> str:
        """Labels of the channels of the tensor; those of groups are two dims, and the same of `weights` and `results`."""
        return "gc" if self.groups > 1 else "c"

    @property
    def results(self) -> str:
        return "go" if self.groups > 1 else "o"

    @property
    def weights(self) -> str:
        return f"{self.results}c{INSIDE[: self.count]}"

    def grouped(self, c: Call, x: Value, dim: int) -> Value:
        """The channels of each group along a dim of their own."""
        if self.groups == 1:
            return x
        return c.reshape(x, [*x.shape[:dim], self.groups, c.size(x, dim) // self.groups, *x.shape[dim + 1 :]])

    @property
    def count(self) -> int:
        return len(self.kernel)

    @property
    def side_by_side(self) -> bool:
        """Whether they neither overlap nor reach outside, and leave nothing out between them."""
        gaps = any(d != 1 and k > 1 for d, k in zip(self.dilation, self.kernel, strict=True))
        return self.kernel == self.stride and not any(self.padding) and not gaps

    def hot(self, c: Call, dim: int) -> Value:
        """[place, element, position]: 1 where an element of a window is that position of the tensor."""
        starts = c.scale(c.arange(self.places[dim]), self.stride[dim])
        elements = c.scale(c.arange(self.kernel[dim]), self.dilation[dim])
        starts = c.reshape(starts, [self.places[dim], 1, 1])
        position = c.add(starts, c.reshape(elements, [self.kernel[dim], 1]))
        return c.compare("eq", c.add(position, c.full((), -self.padding[dim])), c.arange(self.sizes[dim]), whole=True)

    def hots(self, c: Call) -> tuple[list[Value], list[str]]:
        labels = [PLACES[dim] + INSIDE[dim] + DIMS[dim] for dim in range(self.count)]
        return [self.hot(c, dim) for dim in range(self.count)], labels


def windows_of(c: Call, x: Value, w: Value, stride: Any, padding: Any, dilation: Any, transposed: bool, groups: int) -> Windows:
    kernel = [int(size) for size in w.shape[2:]]
    if transposed:
        raise Undescribed("a convolution that is transposed")
    if len(x.shape) != len(w.shape):
        raise Undescribed("a convolution without a batch")
    sizes = [c.size(x, 2 + place) for place in range(len(kernel))]
    s, p, d = ([int(each) for each in given] * (len(kernel) if len(given) == 1 else 1) for given in (stride, padding, dilation))
    places = [(n + 2 * p[i] - d[i] * (kernel[i] - 1) - 1) // s[i] + 1 for i, n in enumerate(sizes)]
    return Windows(sizes, kernel, places, s, p, d, groups)


def _in_rows(c: Call, x: Value, windows: Windows) -> Value:
    """x as [batch, channels, places..., elements of a window...], of windows side by side; what is left over is cut off."""
    split: list[int] = []
    for dim, size in enumerate(windows.kernel):
        rows = windows.places[dim]
        x = c.cut(x, 2 + dim, 0, rows * size)
        split += [rows, size]
    wide = c.reshape(x, [*x.shape[:2], *split])
    count = windows.count
    return c.permute(wide, [0, 1, *range(2, 2 + 2 * count, 2), *range(3, 3 + 2 * count, 2)])


def _seen(c: Call, x: Value, windows: Windows) -> Value:
    """x as [batch, channels, places..., elements of a window...]; groups of channels are a dim of their own."""
    if windows.side_by_side:
        return windows.grouped(c, _in_rows(c, x, windows), 1)
    places, inside, dims = (labels[: windows.count] for labels in (PLACES, INSIDE, DIMS))
    hots, labels = windows.hots(c)
    return windows.grouped(c, c.einsum([f"nc{dims}", *labels], f"nc{places}{inside}", x, *hots), 1)


@row("aten.convolution.default", means="a product with each window", needs="not transposed")
def convolution(
    c: Call, x: Value, w: Value, b: Value | None, stride: Any, padding: Any, dilation: Any, transposed: bool, _: Any,
    groups: int,
) -> Value:  # fmt: skip
    windows = windows_of(c, x, w, stride, padding, dilation, transposed, groups)
    places, inside = PLACES[: windows.count], INSIDE[: windows.count]
    labels = [f"n{windows.channels}{places}{inside}", windows.weights]
    y = c.einsum(labels, f"n{windows.results}{places}", _seen(c, x, windows), windows.grouped(c, w, 0))
    y = c.reshape(y, c.shape)
    return y if b is None else c.add(y, c.reshape(b, [c.size(b, 0), *[1] * windows.count]))


@row("aten.convolution_backward.default", means="the gradients of a product with each window", needs="not transposed")
def convolution_backward(
    c: Call, g: Value, x: Value, w: Value, _bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, _: Any,
    groups: int, asked: Sequence[bool],
) -> tuple[Value | None, ...]:  # fmt: skip
    windows = windows_of(c, x, w, stride, padding, dilation, transposed, groups)
    places, inside = PLACES[: windows.count], INSIDE[: windows.count]
    dx = _back(c, g, x, w, windows) if asked[0] else None
    wide = _seen(c, x, windows) if asked[1] else None
    labels = [f"n{windows.results}{places}", f"n{windows.channels}{places}{inside}"]
    dw = None if wide is None else c.reshape(c.einsum(labels, windows.weights, windows.grouped(c, g, 1), wide), w.shape)
    db = c.sum(g, [0, *range(2, len(g.shape))]) if asked[2] else None
    return tuple(each for each in (dx, dw, db) if each is not None)


def _back(c: Call, g: Value, x: Value, w: Value, windows: Windows) -> Value:
    """What each position of the tensor gets from all windows that it is in."""
    places, inside, dims = (labels[: windows.count] for labels in (PLACES, INSIDE, DIMS))
    labels, result = [f"n{windows.results}{places}", windows.weights], f"n{windows.channels}{places}{inside}"
    rows = c.einsum(labels, result, windows.grouped(c, g, 1), windows.grouped(c, w, 0))
    if windows.groups > 1:
        rows = c.reshape(rows, [c.size(x, 0), c.size(x, 1), *windows.places, *windows.kernel])
    if windows.side_by_side and all(n == p * k for n, p, k in zip(windows.sizes, windows.places, windows.kernel, strict=True)):
        order = [0, 1, *(2 + place + windows.count * part for place in range(windows.count) for part in (0, 1))]
        return c.reshape(c.permute(rows, order), x.shape)
    hots, places_of = windows.hots(c)
    return c.einsum([f"nc{places}{inside}", *places_of], f"nc{dims}", rows, *hots)
