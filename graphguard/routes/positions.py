"""The two forms that all operators at known positions become: elements that are picked, and elements that are put or added."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from graphguard.graph.ir import Value
from graphguard.routes.builder import Builder

NONE = -1  # where no element is put


def inside(index: torch.Tensor, size: int, wraps: bool = False) -> torch.Tensor | None:
    """Positions from 0 on; None if one lies outside, where torch raises."""
    index = index.long()
    if wraps:
        index = torch.where(index < 0, index + size, index)
    return index if not index.numel() or (int(index.min()) >= 0 and int(index.max()) < size) else None


def picked(build: Builder, x: Value, first: int, places: torch.Tensor) -> Value:
    """The elements of x at `places`, each a row of positions in the dims from `first` on, along one dim in their stead."""
    dims = places.shape[1]
    before, after = x.shape[:first], x.shape[first + dims :]
    parts = []
    for low, high, along in _steps(places):
        start = places[low].tolist()
        box = {first + d: (at, at + (high - low if d == along else 1)) for d, at in enumerate(start)}
        parts.append(build.view(build.box(x, box), (*before, high - low, *after)))
    return build.joined(parts, first) if parts else build.zeros((*before, 0, *after), x.dtype)


def _steps(places: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Runs of places that are neighbours along one dim, which is the third number."""
    count, dims = places.shape
    gaps = (places[1:] - places[:-1]).tolist()
    units = [[int(d == along) for d in range(dims)] for along in range(dims)]
    low = 0
    while low < count:
        along = units.index(gaps[low]) if low < len(gaps) and gaps[low] in units else dims - 1
        high = low + 1
        while high < count and gaps[high - 1] == units[along]:
            high += 1
        yield low, high, along
        low = high


def layers(places: torch.Tensor, shape: Sequence[int]) -> list[torch.Tensor]:
    """Which element is put where: for each place the number of the first one, then that of the second, and so on."""
    found: list[torch.Tensor] = []
    seen: dict[tuple[int, ...], int] = {}
    for number, place in enumerate(map(tuple, places.tolist())):
        depth = seen[place] = seen.get(place, -1) + 1
        if depth == len(found):
            found.append(torch.full(tuple(shape), NONE))
        found[depth][place] = number
    return found


def put(build: Builder, x: Value, first: int, places: torch.Tensor, y: Value) -> Value | None:
    """x with y's elements along dim `first` in these places; None if there are two for one, as either may be the last, and
    where torch raises: neither tensor takes the dtype of the other."""
    covered = range(first, first + places.shape[1])
    sources = layers(places, [x.shape[d] for d in covered])
    if len(sources) > 1 or x.dtype != y.dtype:
        return None
    return x if not sources else _laid(build, sources[0], first, y, x)


def added(build: Builder, x: Value, first: int, places: torch.Tensor, y: Value) -> Value | None:
    """x with y's elements along dim `first` added in these places; None where torch raises, as above."""
    if x.dtype != y.dtype:
        return None
    for source in layers(places, [x.shape[d] for d in range(first, first + places.shape[1])]):
        x = build.add(x, _laid(build, source, first, y, None))
    return x


def _laid(build: Builder, source: torch.Tensor, first: int, y: Value, x: Value | None) -> Value:
    """y's elements as `source` has them in the dims from `first` on; elsewhere x, or zeros."""
    dims = source.dim()
    before, after = y.shape[:first], y.shape[first + 1 :]

    def block(part: torch.Tensor, box: dict[int, tuple[int, int]]) -> Value:
        place = len(box)
        if place == dims or bool((part == NONE).all()):
            box = {**box, **{first + d: (0, source.shape[d]) for d in range(place, dims)}}
            if x is not None:
                return build.box(x, box)
            return build.zeros((*before, *(high - low for low, high in box.values()), *after), y.dtype)
        parts = []
        last = place == dims - 1
        for low, high, number in _stretches(part.reshape(part.shape[0], -1), last):
            if last and number != NONE:
                taken = build.cut(y, first, number, number + high - low)
                parts.append(build.view(taken, (*before, *[1] * place, high - low, *after)))
            else:
                parts.append(block(part[low], {**box, first + place: (low, high)}))
        return build.joined(parts, first + place)

    return block(source, {})


def _stretches(rows: torch.Tensor, last: bool) -> Iterator[tuple[int, int, int]]:
    """Neighbours that have no element, or, of the last dim, elements that follow each other. The first one's number, too."""
    low, count = 0, rows.shape[0]
    bare = (rows == NONE).all(1).tolist()
    numbers = rows[:, 0].tolist() if last else [NONE if each else 0 for each in bare]
    while low < count:
        high = low + 1
        while high < count and (bare[low] and bare[high] if bare[low] or not last else numbers[high] == numbers[high - 1] + 1):
            high += 1
        yield low, high, numbers[low]
        low = high


def flat_places(index: torch.Tensor) -> torch.Tensor:
    """Positions in one dim, as places."""
    return index.reshape(-1, 1)


def grid_places(indices: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """Positions in several dims, broadcast against each other, as places."""
    return torch.stack([each.expand(tuple(shape)).reshape(-1) for each in indices], 1)
