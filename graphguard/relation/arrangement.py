"""Tiles of an output at any place, in any order of the ranks, transposed or reshaped, and the expression that joins them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

Spans = tuple[tuple[int, int], ...]
MOST_WRITTEN = 8  # tiles in an expression


@dataclass(frozen=True)
class Tile:
    """What a rank holds: a cutout of the output, its dims in another order, reshaped to the rank's own shape.

    spans: by dim of the output, or of the flat output where `flat`. order: of the cutout's dims, as `permute` takes it.
    within: where the cutout lies in the rank's tensor, flat where the tile is, if that holds more: other tiles, or padding.
    """

    spans: Spans
    order: tuple[int, ...]
    shape: tuple[int, ...]
    flat: bool = False
    within: Spans | None = None

    def expression(self, name: str) -> str:
        """The cutout itself, made from the rank's tensor."""
        sizes = tuple(high - low for low, high in self.spans)
        turned = tuple(sizes[dim] for dim in self.order)
        if self.within is not None:
            held = (prod(self.shape),) if self.flat else self.shape
            text = f"{name}.reshape(-1)" if self.flat and len(self.shape) != 1 else name
            text += _sliced(self.within, held)
        else:
            text = name if self.shape == turned else f"{name}.reshape{_tuple((-1,) if self.flat else turned)}"
        back = tuple(sorted(range(len(self.order)), key=self.order.__getitem__))
        return text if back == tuple(range(len(back))) else f"{text}.permute{_tuple(back)}"


@dataclass(frozen=True)
class Arrangement:
    """By rank, its tiles of an output of some shape: one, or several side by side."""

    shape: tuple[int, ...]
    tiles: Mapping[int, tuple[Tile, ...]]

    def rebuilt(self, path: str) -> str | None:
        """The output as a clean expression of the ranks' tensors; None if the tiles leave something out."""
        every = [(rank, tile) for rank, tiles in sorted(self.tiles.items()) for tile in tiles]
        flat = any(tile.flat for _, tile in every)
        if flat and not all(tile.flat for _, tile in every):
            return None
        box: Spans = ((0, prod(self.shape)),) if flat else tuple((0, size) for size in self.shape)
        pieces = [(tile.spans, tile.expression(f"rank{rank}.{path}")) for rank, tile in every]
        parts = _joined(box, pieces)
        if parts is None:
            return None
        return f"{parts}.reshape{_tuple(self.shape)}" if flat and len(self.shape) != 1 else parts


def _joined(box: Spans, pieces: Sequence[tuple[Spans, str]]) -> str | None:
    """What a box holds. Cut at the edges of all pieces along a dim, each strip is one piece's, or is cut along another dim."""
    whole = next((text for text in _covering(box, pieces)), None)
    if whole is not None:
        return whole
    for dim, (low, high) in enumerate(box):
        edges = sorted({low, high, *(edge for spans, _ in pieces for edge in spans[dim] if low < edge < high)})
        if len(edges) == 2:
            continue
        strips = _strips(box, dim, edges, pieces)
        if strips is None:
            return None
        shown = strips if len(strips) <= MOST_WRITTEN else [*strips[: MOST_WRITTEN // 2], "...", strips[-1]]
        return f"concat({', '.join(shown)}, dim={dim})"
    return None


def _strips(box: Spans, dim: int, edges: Sequence[int], pieces: Sequence[tuple[Spans, str]]) -> list[str] | None:
    strips, low = [], edges[0]
    while low < edges[-1]:
        longer = (high for high in reversed(edges) if high > low and any(_covering(_with(box, dim, (low, high)), pieces)))
        high = next(longer, next(edge for edge in edges if edge > low))
        strip = _joined(_with(box, dim, (low, high)), pieces)
        if strip is None:
            return None
        strips.append(strip)
        low = high
    return strips


def _covering(box: Spans, pieces: Sequence[tuple[Spans, str]]) -> Iterator[str]:
    for spans, text in pieces:
        if all(begin <= low and high <= end for (begin, end), (low, high) in zip(spans, box, strict=True)):
            inner = tuple((low - begin, high - begin) for (begin, _), (low, high) in zip(spans, box, strict=True))
            yield text + _sliced(inner, [end - begin for begin, end in spans])


def _sliced(spans: Spans, sizes: Sequence[int]) -> str:
    """The index that takes spans out of a tensor; nothing where they are all of it."""
    cuts = [
        ":" if (low, high) == (0, size) else f"{low or ''}:{high if high < size else ''}"
        for (low, high), size in zip(spans, sizes, strict=True)
    ]
    while cuts and cuts[-1] == ":":
        cuts.pop()
    return f"[{', '.join(cuts)}]" if cuts else ""


def _with(box: Spans, dim: int, span: tuple[int, int]) -> Spans:
    return (*box[:dim], span, *box[dim + 1 :])


def _tuple(numbers: Sequence[int]) -> str:
    return f"({', '.join(map(str, numbers))})" if numbers else "(())"
