"""Which elements of a tensor code hands to each rank. Code that only moves elements is told by what it does with labels: each
element of its result is one of the labels, or a number that no label changes (padding), whatever the labels are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from graphguard.aten.operators import DTYPES
from graphguard.graph.ir import Graph
from graphguard.oracle.replay import run

MOST_ELEMENTS = 2**25  # of all ranks' parts together, for which elements are counted one by one
_SCALES = (1e30, 1.0, 1e-30)  # of labels at which code that computes shows itself
_PADDING = -1


class NotClean(Exception):
    """Code that does more than move elements; `index` is where, in its result."""

    def __init__(self, index: tuple[int, ...]):
        super().__init__(str(index))
        self.index = index


def sources_of(graph: Graph, given: str, made: str) -> torch.Tensor:
    """For each element that a graph makes of a tensor, which one of it that is, counted in memory order; -1 for padding."""
    value = graph.inputs[given]
    labels = _Labels(graph, given, made, torch.Size(value.shape), DTYPES[value.dtype])
    return labels.of_floats() if labels.is_float else labels.of_whole_numbers()


class _Labels:
    def __init__(self, graph: Graph, given: str, made: str, shape: torch.Size, dtype: torch.dtype):
        self.graph, self.given, self.made, self.shape, self.dtype = graph, given, made, shape, dtype
        self.count = math.prod(shape)
        self.is_float = dtype.is_floating_point or dtype.is_complex
        self.generator = torch.Generator().manual_seed(0)

    def made_of(self, labels: torch.Tensor) -> torch.Tensor:
        """What the graph makes of labels in memory order."""
        result = run(self.graph, {self.given: labels.reshape(self.shape)}, wide=True).outputs()[self.made]
        assert result is not None
        return result

    def of_floats(self) -> torch.Tensor:
        places = torch.arange(1, self.count + 1, dtype=torch.float64)
        ones = places.to(torch.complex128) * (1 + 2j) if self.dtype.is_complex else places
        first, second = self.made_of(ones), self.made_of(-ones)
        fixed = _same(first, second)
        sources = torch.where(fixed, _PADDING, (first.real if first.is_complex() else first).nan_to_num().long() - 1)
        self._require(fixed | ((sources >= 0) & (sources < self.count)))
        others = [torch.randn(self.count, generator=self.generator, dtype=torch.float64) * scale for scale in _SCALES]
        self._require_moved(sources, first, [ones, -ones, *(other.to(ones.dtype) for other in others)])
        return sources

    def of_whole_numbers(self) -> torch.Tensor:
        """Few numbers may be all there are, so a place is spelled in bits, each a label of its own."""
        places = torch.arange(self.count)
        sources, seen = None, []
        for bit in range(max(1, self.count.bit_length())):
            label = (places >> bit & 1).to(self.dtype)
            first, second = self.made_of(label), self.made_of(1 - label if self.dtype != torch.bool else ~label)
            fixed = first == second
            digit = (first != 0).long() << bit
            sources = digit if sources is None else sources + digit
            seen.append((label, fixed, first))
        assert sources is not None
        padding = seen[0][1]
        sources = torch.where(padding, _PADDING, sources)
        self._require(padding | (sources < self.count))
        for label, fixed, _ in seen:
            self._require(fixed == padding)
            self._require_moved(sources, seen[0][2], [label])
        self._require_moved(sources, seen[0][2], list(self._numbers()))
        return sources

    def _numbers(self) -> Iterator[torch.Tensor]:
        low, high = (0, 1) if self.dtype == torch.bool else (torch.iinfo(self.dtype).min, torch.iinfo(self.dtype).max)
        for _ in _SCALES:
            drawn = torch.rand(self.count, generator=self.generator, dtype=torch.float64)
            yield (drawn < 0.5) if self.dtype == torch.bool else (low + drawn * (high / 2 - low / 2)).to(self.dtype)

    def _require_moved(self, sources: torch.Tensor, fixed: torch.Tensor, all_labels: Sequence[torch.Tensor]) -> None:
        for labels in all_labels:
            result = self.made_of(labels)
            wide = labels.to(result.dtype)
            at = sources.clamp(min=0)
            wanted = torch.where(sources == _PADDING, fixed, wide[at] if self.count else fixed)
            self._require(_same(result, wanted))

    @staticmethod
    def _require(holds: torch.Tensor) -> None:
        wrong = (~holds).nonzero()
        if len(wrong):
            raise NotClean(tuple(int(place) for place in wrong[0]))


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | ((a != a) & (b != b))


def holders(sources: Sequence[torch.Tensor | None], count: int) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """The elements that the same ranks have, for each such set of ranks; those that no rank has are among them."""
    marks = torch.zeros((len(sources), count), dtype=torch.bool)
    for rank, each in enumerate(sources):
        if each is not None:
            marks[rank, each[each >= 0].reshape(-1)] = True
    group = torch.zeros(count, dtype=torch.int64)
    for row in marks:
        group = torch.unique(group * 2 + row, return_inverse=True)[1]
    found = []
    for number in range(int(group.max()) + 1 if count else 0):
        places = (group == number).nonzero().reshape(-1)
        found.append((tuple(int(rank) for rank in marks[:, places[0]].nonzero().reshape(-1)), places))
    return found


def in_words(places: torch.Tensor, shape: Sequence[int]) -> str:
    """`elements [1, 0] to [3, 2] of (4, 3)`."""
    first, last = int(places[0]), int(places[-1])
    if not shape:
        return "the number"
    ends = [[int(i) for i in torch.unravel_index(torch.tensor(place), tuple(shape))] for place in (first, last)]
    of = f" of {tuple(shape)}"
    if len(places) == 1:
        return f"the element {ends[0]}{of}"
    if last - first + 1 == len(places):
        return f"the elements {ends[0]} to {ends[1]}{of}"
    return f"{len(places)} elements between {ends[0]} and {ends[1]}{of}"
