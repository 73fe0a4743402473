"""How a sequential output is rebuilt from what the ranks return: equal copies, tiles of a grid, or a sum of true parts.

Every relation tried is applied to the description of the sequential output and must give exactly what each rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from graphguard.engine.algebra.alike import signature
from graphguard.engine.algebra.expansion import equal_written_out
from graphguard.engine.algebra.sums import folded
from graphguard.engine.algebra.value import add, cut, same, scale, taken
from graphguard.engine.ranks import semantics
from graphguard.engine.ranks.collective import Groups, groups_of
from graphguard.engine.ranks.collective_call import spread
from graphguard.engine.relate.summands import Summands, summands
from graphguard.engine.store.table import Table
from graphguard.engine.tensors.one_piece import in_pieces_again
from graphguard.engine.tensors.ops import Ops
from graphguard.engine.terms.lane import Lane, Lanes, collapse, equal, everywhere
from graphguard.engine.terms.term import Term, Undescribed, Value, Variable, extent
from graphguard.engine.terms.unknown import Described, Unknown
from graphguard.graph.ir import Mesh
from graphguard.graph.placement import SUM, Partial, Placements, candidates, has_partial
from graphguard.graph.tiles import tiles_of


@dataclass(frozen=True)
class OutputPart:
    """What some ranks hold, one lane each."""

    ranks: tuple[int, ...]
    value: Value


@dataclass
class Held:
    """One output of the ranks that return it. `mesh` is the sub-grid of those ranks; `order` lists them row-major."""

    mesh: Mesh
    order: tuple[int, ...]
    parts: list[OutputPart]
    unknown: Unknown | None = None


def held(mesh: Mesh, streams: Sequence[tuple[tuple[int, ...], Described | None]]) -> Held | None:
    """The ranks' output, if the ranks that return it form a grid."""
    ranks = _returning(streams)
    grid = mesh.sub_grid(ranks)
    return None if grid is None else _held(grid, ranks, streams)


def held_in_a_row(streams: Sequence[tuple[tuple[int, ...], Described | None]]) -> Held:
    """The output of ranks that form no grid: no axis of the mesh can be named for them."""
    ranks = _returning(streams)
    return _held(Mesh.of({"rank": len(ranks)}), ranks, streams)


def _returning(streams: Sequence[tuple[tuple[int, ...], Described | None]]) -> list[int]:
    return sorted(rank for members, value in streams if value is not None for rank in members)


def _held(grid: Mesh, ranks: Sequence[int], streams: Sequence[tuple[tuple[int, ...], Described | None]]) -> Held:
    unknown = next((value for _, value in streams if isinstance(value, Unknown)), None)
    parts = [OutputPart(members, value) for members, value in streams if isinstance(value, Value)]
    return Held(grid, tuple(ranks), parts, unknown)


class Relator:
    def __init__(self, ops: Ops):
        self.ops, self.table = ops, ops.table
        self._tiles: dict[tuple[tuple[int, ...], Mesh, Placements], Lanes] = {}

    def candidates(self, whole: Sequence[int], output: Held, sums: bool = True) -> Iterator[Placements]:
        """Relations by placements that fit the shapes, without sums first."""
        return (each for each in candidates(len(whole), output.mesh, sums) if self.fits(whole, output, each))

    def fits(self, whole: Sequence[int], output: Held, placements: Placements) -> bool:
        """Whether the placements give every rank a part of the shape that it holds."""
        tiles = self.tiles(whole, output, placements)
        sizes = tiles[:, :, 1] - tiles[:, :, 0]
        lane_of = {rank: lane for lane, rank in enumerate(output.order)}
        for part in output.parts:
            if len(part.value.shape) != len(whole):
                return False
            held = sizes[[lane_of[rank] for rank in part.ranks]]
            if not all(np.all(held[:, dim] == size) for dim, size in enumerate(part.value.shape)):
                return False
        return True

    def tiles(self, whole: Sequence[int], output: Held, placements: Placements) -> Lanes:
        """The parts of all lanes: an array [lanes, dims, 2]."""
        key = (tuple(whole), output.mesh, placements)
        if key not in self._tiles:
            self._tiles[key] = tiles_of(whole, output.mesh, placements)
        return self._tiles[key]

    def holds(self, whole: Value, output: Held, placements: Placements) -> bool:
        """Whether the ranks hold exactly what the placements say."""
        try:
            if not has_partial(placements):
                return all(self._is_as_placed(whole, output, placements, part) for part in output.parts)
            total = self.together(output)
            for axis, placement in enumerate(placements):
                if isinstance(placement, Partial):
                    total = self.reduced(total, output.mesh, axis, placement.reduce)
            everyone = OutputPart(output.order, total)
            return self.equal(self.expected(whole, output, placements, everyone), total)
        except Undescribed:
            return False

    def _is_as_placed(self, whole: Value, output: Held, placements: Placements, part: OutputPart) -> bool:
        """Of all ranks at once, or else of one after the other: a first or a last rank may be simpler than those between."""
        if self.equal(self.expected(whole, output, placements, part), part.value):
            return True
        if len(part.ranks) == 1 or self.table.over("ranks_apart", len(part.ranks)):
            return False
        return all(self.equal(self.expected(whole, output, placements, each), each.value) for each in self.apart(part))

    def apart(self, part: OutputPart) -> Iterator[OutputPart]:
        """What each rank holds alone."""
        for lane, rank in enumerate(part.ranks):
            yield OutputPart((rank,), taken(self.table, part.value, np.array([lane], dtype=np.int64)))

    def equal(self, a: Value, b: Value) -> bool:
        if same(a, b):
            return True
        alike = len(a.shape) == len(b.shape) and all(equal(x, y) for x, y in zip(a.shape, b.shape, strict=True))
        return alike and (equal_written_out(self.table, a, b) or self._same_in_pieces(a, b))

    def _same_in_pieces(self, a: Value, b: Value) -> bool:
        """Whether two tensors are the same once what steps leave of their terms are boxes."""
        one, other = (in_pieces_again(self.table, each) for each in (a, b))
        if one is None and other is None:
            return False
        return same(folded(self.table, one or a), folded(self.table, other or b))

    def expected(self, whole: Value, output: Held, placements: Placements, part: OutputPart) -> Value:
        sizes = [int(size) for size in whole.shape]
        lane_of = {rank: lane for lane, rank in enumerate(output.order)}
        tiles = self.tiles(sizes, output, placements)[[lane_of[rank] for rank in part.ranks]]
        value = whole
        for dim in range(len(sizes)):
            value = cut(self.table, value, dim, collapse(tiles[:, dim, 0]), collapse(tiles[:, dim, 1]))
        return folded(self.table, value)

    def together(self, output: Held) -> Value:
        """What all ranks hold, by lane of the output's own mesh."""
        if len(output.parts) == 1 and output.parts[0].ranks == output.order:
            return output.parts[0].value
        pieces = []
        for part in output.parts:
            lanes = np.zeros(len(output.order), dtype=np.int64)
            present = np.zeros(len(output.order), dtype=np.int64)
            for lane, rank in enumerate(part.ranks):
                place = output.order.index(rank)
                lanes[place], present[place] = lane, 1
            pieces.append(spread(self.table, part.value, lanes, present))
        return folded(self.table, add(self.table, pieces))

    def groups(self, mesh: Mesh, axis: int) -> Groups:
        lanes = np.arange(mesh.size, dtype=np.int64).reshape(mesh.shape)
        return groups_of(np.moveaxis(lanes, axis, -1).reshape(-1, mesh.shape[axis]))

    def reduced(self, value: Value, mesh: Mesh, axis: int, reduce: str) -> Value:
        """The reduction over an axis of the mesh."""
        return semantics.reduced(self.ops, value, self.groups(mesh, axis), {"reduce": reduce})

    def summands(self, output: Held, placements: Placements, stated: bool) -> Summands:
        """What the ranks hold, whose sum or mean over some axes is the output."""
        summed = [self.groups(output.mesh, axis) for axis, each in enumerate(placements) if each == SUM]
        averaged = [self.groups(output.mesh, axis) for axis, each in enumerate(placements) if each == Partial("avg")]
        if not summed and not averaged:
            return Summands.PARTS
        return summands(self.table, self.together(output), summed, averaged, stated)

    def factor(self, whole: Value, output: Held) -> tuple[Fraction, Placements] | None:
        """The number by which what the ranks hold differs from a relation without sums, if that is all."""
        sizes = [int(size) for size in whole.shape]
        for placements in self.candidates(sizes, output, sums=False):
            found = self._factor(whole, output, placements)
            if found is not None:
                return found, placements
        return None

    def _factor(self, whole: Value, output: Held, placements: Placements) -> Fraction | None:
        try:
            factors = set()
            for part in output.parts:
                wanted = self.expected(whole, output, placements, part)
                if not wanted.terms or len(wanted.terms) != len(part.value.terms):
                    return None
                lead = min(wanted.terms, key=lambda t: [f.atom.id for f in t.factors])
                mine = min(part.value.terms, key=lambda t: [f.atom.id for f in t.factors])
                if not equal(lead.weight, mine.weight):
                    return None
                number = mine.coefficient / lead.coefficient
                if not same(scale(wanted, number), part.value):
                    return None
                factors.add(number)
            return factors.pop() if len(factors) == 1 else None
        except Undescribed:
            return None


def tile_of(table: Table, whole: Value, part: Value) -> list[Lane] | None:
    """Where in the whole a part of it lies, if it is one: the start along each dim, which may differ between lanes."""
    if len(whole.shape) != len(part.shape) or not whole.terms or not part.terms:
        return None
    for mine in whole.terms:
        for its in part.terms:
            starts = _starts(mine, its) if signature(mine) == signature(its) else None
            if starts is None:
                continue
            inside = all(
                everywhere(start >= 0) and everywhere(start + size <= full)
                for start, size, full in zip(starts, part.shape, whole.shape, strict=True)
            )
            if not inside:
                continue
            cutout = whole
            try:
                for dim, start in enumerate(starts):
                    cutout = cut(table, cutout, dim, start, collapse(start + part.shape[dim]))
            except Undescribed:
                continue
            if same(folded(table, cutout), folded(table, part)):
                return starts
    return None


def _starts(mine: Term, its: Term) -> list[Lane] | None:
    """The distance along each dim at which two terms of the same atoms read."""
    starts: list[Lane] = []
    for dim, group in enumerate(mine.dims):
        start: Lane = 0
        if group:
            place = _place_of(mine, group[0])
            if place is not None:
                number, axis, strides = place
                distance = _first(its, number, axis) - _first(mine, number, axis)
                for stride in strides[:-1]:  # of outer dims that the index joins with this one
                    distance = distance - distance // stride * stride
                stride = strides[-1]
                if not everywhere(distance % stride == 0) and len(strides) == 1:
                    return None
                inner = 1
                for variable in group[1:]:
                    inner *= int(extent(mine.ranges[variable]))
                start = collapse(distance // stride * inner)
        starts.append(collapse(start + mine.box[dim][0] - its.box[dim][0]))
    return starts


def _place_of(term: Term, variable: Variable) -> tuple[int, int, list[int]] | None:
    """The factor and the axis whose index has a variable, and the strides of what is shown there, down to the variable's."""
    for number, factor in enumerate(term.factors):
        for axis, index in enumerate(factor.at):
            if variable in dict(index.terms):
                shown = [(v, stride) for v, stride in index.terms if v in term.visible]
                return number, axis, [stride for _, stride in shown[: [v for v, _ in shown].index(variable) + 1]]
    return None


def _first(term: Term, number: int, axis: int) -> Lane:
    """The position that an index has at the first element."""
    index = term.factors[number].at[axis]
    position = index.offset
    for variable, stride in index.terms:
        position = position + stride * term.ranges[variable][0]
    return collapse(position)
