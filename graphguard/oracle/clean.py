"""Which clean relation, if any, the numbers of an output show: the same one in every trial.

Placements in the order of the ranks come first. Then each rank's tensor, or the sum of several, is sought anywhere in the
output, transposed or reshaped, or as slices of it side by side; together they must cover it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from graphguard.engine.relate.arrangements import is_padded_to
from graphguard.engine.relate.outputs import Held
from graphguard.engine.relate.show import relation_of
from graphguard.graph.limits import Stops
from graphguard.graph.placement import REPLICATE, SUM, Partial, Placements, Spans, has_partial
from graphguard.oracle.grid import Grid, cut
from graphguard.oracle.reference import Reference, Slack, rounding_of

_LEAST_PLACES = 64  # at which a tile is tried, however large it is
_SHOWN = 4  # ranks in a text


@dataclass(frozen=True)
class Observed:
    """One output of one trial: the sequential value, and the ranks' tensors by lane of the grid.

    unsure: by lane and element, how far another run on the same inputs was away; empty where there was none.
    """

    reference: Reference
    tensors: list[torch.Tensor]
    unsure: Sequence[torch.Tensor] = ()

    def slack(self, grid: Grid, placements: Placements) -> Sequence[Slack]:
        """By lane, what rounding may do to the tensors as placements reduce them."""
        summed = tuple(SUM if isinstance(each, Partial) else each for each in placements)
        rounding = rounding_of(self.tensors) if SUM in summed else 0.0
        unsure = grid.reduced(list(self.unsure), summed) if self.unsure else None
        return [rounding] * len(self.tensors) if unsure is None else [rounding + each for each in unsure]


@dataclass(frozen=True)
class Clean:
    """A relation that the numbers show."""

    text: str
    placements: Placements | None = None


# ---------------------------------------------------------------------- placements
def holds(grid: Grid, placements: Placements, samples: Sequence[Observed], patience: float = 1.0) -> bool:
    """Whether the ranks hold what placements say, in every trial. `patience` multiplies what rounding is allowed."""
    return all(worst(grid, placements, sample) <= patience for sample in samples)


def worst(grid: Grid, placements: Placements, sample: Observed) -> float:
    """How many times the tolerance the ranks' tensors are away from what placements say."""
    shape = sample.reference.whole.shape
    tensors = sample.tensors
    if has_partial(placements):
        reduced = grid.reduced(tensors, placements)
        if reduced is None:
            return math.inf
        tensors = reduced
    slack = sample.slack(grid, placements)
    largest = 0.0
    for lane, tensor in enumerate(tensors):
        spans = grid.spans(shape, placements, lane)
        if tuple(tensor.shape) != tuple(high - low for low, high in spans):
            return math.inf
        if tensor.numel():
            part = sample.reference.at(lambda t, spans=spans: cut(t, spans))  # type: ignore[misc]
            largest = max(largest, float(part.excess(tensor, slack[lane]).max()))
        if largest == math.inf:
            break
    return largest


def fits(grid: Grid, placements: Placements, sample: Observed) -> bool:
    """Whether the shapes are those of placements."""
    shape = sample.reference.whole.shape
    return all(
        tuple(tensor.shape) == tuple(high - low for low, high in grid.spans(shape, placements, lane))
        for lane, tensor in enumerate(sample.tensors)
    )


def are_shares(grid: Grid, placements: Placements, samples: Sequence[Observed], stated: bool = False) -> bool:
    """Whether the summands along some axis are fixed fractions of their sum, which is what copies are, not parts.

    One rank that has all, beside others that have zeros, is a sum of parts of which all but one are empty. Where a sum is
    stated, numbers that are the same whatever the inputs are, such as a count of elements, are parts.
    """
    if stated and _is_constant(samples):
        return False
    return any(placement == SUM and _shares_along(grid, axis, samples) for axis, placement in enumerate(placements))


def _is_constant(samples: Sequence[Observed]) -> bool:
    first, *others = samples
    return bool(others) and all(sample.reference.whole.equal(first.reference.whole) for sample in others)


def _shares_along(grid: Grid, axis: int, samples: Sequence[Observed]) -> bool:
    if sum(tensor.numel() for sample in samples for tensor in sample.tensors[:1]) < 2:
        return False  # any number is a multiple of any other
    seen = False
    for first in range(len(grid.ranks)):
        lanes = grid.lanes_along(axis, first)
        if lanes[0] != first:
            continue
        groups = [_scaled([_flat(sample.tensors[lane]) for lane in lanes]) for sample in samples]
        flat = [torch.cat([group[place] for group in groups]) for place in range(len(lanes))]
        total = torch.stack(flat).sum(0)
        weight = torch.dot(total, total)
        if not bool(weight > 0):
            continue
        shares = [torch.dot(part, total) / weight for part in flat]
        if any(
            bool((part - share * total).abs().max() > 1e-7 * total.abs().max())
            for part, share in zip(flat, shares, strict=True)
        ):
            return False
        if sum(abs(float(share)) > 1e-7 for share in shares) == 1:
            return False
        seen = True
    return seen


def _scaled(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """To numbers of at most 1: where inputs are large, one sample would outweigh all others, and be a multiple of itself."""
    largest = max((float(part.abs().max()) for part in parts if part.numel()), default=0.0)
    return [part / largest for part in parts] if largest > 0 else parts


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.reshape(-1).to(torch.float64).nan_to_num()


def placed(
    path: str, grid: Grid, samples: Sequence[Observed], dtype: str, most: int, sums: bool = True
) -> tuple[Clean | None, bool]:
    """The first placements that hold, and whether there were such as hold for shares only."""
    shape = tuple(samples[0].reference.whole.shape)
    shares = False
    for placements in grid.candidates(shape, sums)[:most]:
        if not fits(grid, placements, samples[0]) or not holds(grid, placements, samples):
            continue
        if are_shares(grid, placements, samples):
            shares = True
            continue
        held = Held(grid.mesh, grid.ranks, [])
        return Clean(relation_of(path, placements, held, (dtype, shape)).text, placements), shares
    return None, shares


def reshaped(path: str, grid: Grid, samples: Sequence[Observed], most: int) -> Clean | None:
    """The placements that hold once each rank's tensor has the shape of its tile."""
    for placements in grid.candidates(samples[0].reference.whole.shape, sums=False)[:most]:
        if all(fits_once_reshaped(grid, placements, sample) for sample in samples):
            return Clean(f"{path} is held as {', '.join(map(str, placements))}, reshaped")
    return None


def fits_once_reshaped(grid: Grid, placements: Placements, sample: Observed) -> bool:
    slack = sample.slack(grid, placements)
    for lane, tensor in enumerate(sample.tensors):
        spans = grid.spans(sample.reference.whole.shape, placements, lane)
        sizes = [high - low for low, high in spans]
        part = sample.reference.at(partial(cut, spans=spans))
        if tensor.numel() != math.prod(sizes) or not part.fits(
            tensor.reshape(sizes), _like(slack[lane], tensor).reshape(sizes)
        ):
            return False
    return True


def padded(path: str, grid: Grid, samples: Sequence[Observed]) -> Clean | None:
    """Equal pieces along a dim, or of the output as one row, that go on beyond its end; what lies there is not claimed."""
    real = [axis for axis, size in enumerate(grid.mesh.shape) if size > 1]
    shapes = {tensor.shape for tensor in samples[0].tensors}
    if len(shapes) != 1:
        return None
    dims = range(samples[0].reference.whole.dim()) if len(shapes.pop()) == samples[0].reference.whole.dim() else ()
    for count in range(1, len(real) + 1):
        for axes in itertools.combinations(real, count):
            for dim in (*dims, None):
                if all(_is_padded(grid, axes, dim, sample) for sample in samples):
                    along = "one row" if dim is None else f"dim {dim}"
                    names = ", ".join(grid.mesh.names[axis] for axis in axes)
                    return Clean(f"{path} is held in pieces along {along} over {names}, padded at the end")
    return None


def _is_padded(grid: Grid, axes: Sequence[int], dim: int | None, sample: Observed) -> bool:
    flat = sample.reference.at(lambda t: t.reshape(-1)) if dim is None else sample.reference
    tensors = [t.reshape(-1) for t in sample.tensors] if dim is None else sample.tensors
    along, full = dim or 0, flat.whole.shape[dim or 0]
    size = tensors[0].shape[along]
    if not is_padded_to(size, full, math.prod(grid.mesh.shape[axis] for axis in axes)):
        return False
    for lane, tensor in enumerate(tensors):
        coordinate, position = list(grid.mesh.coordinate(lane).values()), 0
        for axis in axes:
            position = position * grid.mesh.shape[axis] + coordinate[axis]
        start = min(position * size, full)
        kept = min(start + size, full) - start
        if not flat.at(partial(torch.narrow, dim=along, start=start, length=kept)).fits(tensor.narrow(along, 0, kept)):
            return False
    return True


# ---------------------------------------------------------------------- tiles anywhere
def scattered(path: str, grid: Grid, samples: Sequence[Observed], stops: Stops, sums: bool = True) -> Clean | None:
    """A relation of tiles at any place, in any order of dims, or of sums of the ranks that are such tiles."""
    for summed in itertools.product(*((False, True) if size > 1 and sums else (False,) for size in grid.mesh.shape)):
        placements = tuple(SUM if chosen else REPLICATE for chosen in summed)
        reduced = [grid.reduced(sample.tensors, placements) for sample in samples]
        if None in reduced or are_shares(grid, placements, samples):
            continue
        slack = [sample.slack(grid, placements) for sample in samples]
        words = _cover([sample.reference for sample in samples], reduced, slack, stops)  # type: ignore[arg-type]
        if words is not None:
            axes = [name for name, chosen in zip(grid.mesh.names, summed, strict=True) if chosen]
            return Clean(_text(path, grid, words, axes))
    return None


def _cover(
    references: Sequence[Reference], reduced: Sequence[list[torch.Tensor]], slack: Sequence[Sequence[Slack]], stops: Stops
) -> list[str] | None:
    """For each lane, which part of the output it is; None if one is no part, or if they leave something out."""
    covered = torch.zeros(references[0].whole.shape, dtype=torch.bool)
    words = []
    for lane in range(len(reduced[0])):
        held = [tensors[lane] for tensors in reduced]
        place = _place(references, held, [_like(each[lane], t) for each, t in zip(slack, held, strict=True)], stops)
        if place is None:
            return None
        marks, text = place
        covered |= marks
        words.append(text)
    return words if bool(covered.all()) else None


def _place(
    references: Sequence[Reference], tensors: Sequence[torch.Tensor], slack: Sequence[torch.Tensor], stops: Stops
) -> tuple[torch.Tensor, str] | None:
    """Where in the output a tensor lies: marks on the output, and words that follow its name."""
    whole, tensor = references[0].whole, tensors[0]
    marks = torch.zeros(whole.shape, dtype=torch.bool)
    if tensor.numel() == 0:
        return marks, "[nothing]"
    for order in _orders(tensor, whole, stops):
        turned, room = [t.permute(order) for t in tensors], [s.permute(order) for s in slack]
        spans = _tile(references, turned, room, stops)
        if spans is not None:
            cut(marks, spans).fill_(True)
            return marks, _tile_text(spans, whole.shape, order)
    flat = [reference.at(lambda t: t.reshape(-1)) for reference in references]
    spans = _tile(flat, [t.reshape(-1) for t in tensors], [s.reshape(-1) for s in slack], stops)
    if spans is not None:
        cut(marks.reshape(-1), spans).fill_(True)
        return marks, f".reshape(-1)[{spans[0][0]}:{spans[0][1]}], reshaped"
    several = _side_by_side(references, tensors, slack, stops) if tensor.dim() == whole.dim() else []
    for spans in several:
        cut(marks, spans).fill_(True)
    straight = tuple(range(tensor.dim()))
    words = " and ".join(_tile_text(spans, whole.shape, straight) for spans in several)
    return (marks, words) if several else None


def _side_by_side(
    references: Sequence[Reference], tensors: Sequence[torch.Tensor], slack: Sequence[torch.Tensor], stops: Stops
) -> list[Spans]:
    """The slices of the output along one dim, in its order, that make up a tensor in every trial; none if there are no such."""
    for dim, size in enumerate(tensors[0].shape):
        rows = [
            [(t.narrow(dim, row, 1), s.narrow(dim, row, 1)) for t, s in zip(tensors, slack, strict=True)] for row in range(size)
        ]
        found: list[Spans] = []
        first = _tile(references, [t for t, _ in rows[0]], [s for _, s in rows[0]], stops) if size > 1 else None
        if first is None or stops.over("tile_elements", tensors[0].numel() * references[0].whole.shape[dim]):
            continue
        place = first[dim][0]
        for row in rows:
            later = ((*first[:dim], (at, at + 1), *first[dim + 1 :]) for at in range(place, references[0].whole.shape[dim]))
            spans = next((each for each in later if _fits(references, each, row)), None)
            if spans is None:
                break
            found.append(spans)
            place = spans[dim][1]
        if len(found) == size:
            return found
    return []


def _fits(references: Sequence[Reference], spans: Spans, held: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    parts = [reference.at(partial(cut, spans=spans)) for reference in references]
    return all(part.fits(t, s) for part, (t, s) in zip(parts, held, strict=True))


def _tile(
    references: Sequence[Reference], tensors: Sequence[torch.Tensor], slack: Sequence[torch.Tensor], stops: Stops
) -> Spans | None:
    """The first tile of the output that a tensor is, in every trial."""
    places = _places(references[0], tensors[0], slack[0])
    most = max(_LEAST_PLACES, stops.limits.tile_elements // tensors[0].numel())
    for spans in places[:most]:
        if _fits(references, spans, list(zip(tensors, slack, strict=True))):
            return spans
    if len(places) > most:
        stops.note("tile_elements", len(places) * tensors[0].numel())
    return None


def _like(slack: Slack, tensor: torch.Tensor) -> torch.Tensor:
    """By element of a tensor."""
    return torch.as_tensor(slack, dtype=torch.float64).expand(tensor.shape)


def _places(reference: Reference, tensor: torch.Tensor, slack: torch.Tensor) -> list[Spans]:
    """The tiles of a shape in which the tensor's largest number stands where it has it: there are few of it."""
    sizes, whole = torch.tensor(tensor.shape), torch.tensor(reference.whole.shape)
    anchor = int(_flat(tensor).abs().argmax()) if not tensor.is_complex() else 0
    within = torch.tensor([int(each) for each in torch.unravel_index(torch.tensor(anchor), tensor.shape)], dtype=torch.int64)
    near = reference.excess(tensor.reshape(-1)[anchor].expand(reference.whole.shape), slack.reshape(-1)[anchor]) <= 1
    corners = near.nonzero() - within
    inside = (corners >= 0).all(-1) & (corners + sizes <= whole).all(-1)
    return [tuple((low, low + size) for low, size in zip(each, tensor.shape, strict=True)) for each in corners[inside].tolist()]


def _orders(tensor: torch.Tensor, whole: torch.Tensor, stops: Stops) -> Iterator[tuple[int, ...]]:
    if tensor.dim() != whole.dim():
        return
    straight = tuple(range(tensor.dim()))
    orders = iter([straight]) if stops.over("tile_dims", tensor.dim()) else itertools.permutations(straight)
    for order in orders:
        if all(tensor.shape[old] <= size for old, size in zip(order, whole.shape, strict=True)):
            yield order


def _tile_text(spans: Spans, whole: Sequence[int], order: tuple[int, ...]) -> str:
    text = ""
    if any(span != (0, size) for span, size in zip(spans, whole, strict=True)):
        slices = (":" if span == (0, size) else f"{span[0]}:{span[1]}" for span, size in zip(spans, whole, strict=True))
        text = f"[{', '.join(slices)}]"
    if order != tuple(range(len(order))):
        text += f".permute{tuple(sorted(range(len(order)), key=order.__getitem__))}"
    return text


def _text(path: str, grid: Grid, words: Sequence[str], axes: Sequence[str]) -> str:
    name = f"(sum over {', '.join(axes)} of {{rank}}.{path})" if axes else f"{{rank}}.{path}"
    if len(set(words)) == 1:
        return f"{name.format(rank='rank')} = {path}{words[0]}, on every rank"
    shown = [f"{name.format(rank=f'rank{rank}')} = {path}{text}" for rank, text in zip(grid.ranks, words, strict=True)]
    return ", ".join(shown[:_SHOWN]) + (", ..." if len(shown) > _SHOWN else "")
