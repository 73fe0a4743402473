"""`ragged_all_to_all`: pieces of any size, whose offsets and sizes are known."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from graphguard.capture.jax.builder import Builder, per_rank
from graphguard.capture.jax.dtypes import in_graph, numpy_of
from graphguard.capture.jax.known_arrays import Known
from graphguard.capture.jax.lowering import Lowering, rule
from graphguard.capture.jax.mesh import Along
from graphguard.capture.jax.rules.communication import along_of
from graphguard.errors import CaptureError
from graphguard.graph.ir import Value
from graphguard.graph.rank_class import Numbers


@dataclass(frozen=True)
class Pieces:
    """By rank and member of its group: where the piece for the member begins, its size, and where it goes there; and of the
    piece that comes from the member, where it goes, and its size."""

    first: Numbers
    sizes: Numbers
    goals: Numbers
    came_to: Numbers
    came: Numbers

    @staticmethod
    def of(build: Builder, along: Along, numbers: tuple[Any, ...]) -> Pieces:
        if not all(isinstance(each, Known) for each in numbers):
            raise CaptureError("its offsets and sizes are data, so what goes where is not known")
        ranks, count = build.mesh.size, build.places.size(along)
        if len(build.ranks) != ranks:
            raise CaptureError("ranks that went different ways before it have no exact graph yet")
        if any(each.shape != (count,) for each in numbers):
            raise CaptureError("several pieces for each member have no exact graph yet")
        first, sizes, goals, wanted = (np.broadcast_to(each.array, (ranks, count)).astype(np.int64) for each in numbers)
        own = build.place_in(along)
        members = np.stack([build.member(along, np.full(ranks, place)) for place in range(count)], axis=1)
        came_to, came = goals[members, own[:, None]], sizes[members, own[:, None]]
        if (came != wanted).any():
            rank, place = np.argwhere(came != wanted)[0]
            sender, many = members[rank, place], came[rank, place]
            raise CaptureError(f"rank {sender} sends {many} rows to rank {rank}, which expects {wanted[rank, place]}")
        return Pieces(first, sizes, goals, came_to, came)

    @property
    def members(self) -> int:
        return int(self.sizes.shape[1])

    def require_fitting(self, rows: int, room: int) -> None:
        """That pieces lie inside, and no two of them are written to one place, which has no meaning."""
        for begins, sizes, end in ((self.first, self.sizes, rows), (self.came_to, self.came, room)):
            if (sizes < 0).any() or (begins < 0).any() or (begins + sizes > end).any():
                raise CaptureError("a piece begins before its array or ends behind it")
        for begins, sizes in zip(self.came_to, self.came, strict=True):
            spans = sorted((begin, begin + size) for begin, size in zip(begins, sizes, strict=True) if size)
            if any(one[1] > other[0] for one, other in pairwise(spans)):
                raise CaptureError("two pieces are written to one place")

    def written(self) -> list[tuple[Numbers, Numbers]]:
        """The rows that something is written to, by rank: where they begin and how many, neighbours as one."""
        by_rank = []
        for begins, sizes in zip(self.came_to, self.came, strict=True):
            spans: list[list[int]] = []
            for begin, size in sorted((int(begin), int(size)) for begin, size in zip(begins, sizes, strict=True) if size):
                if spans and spans[-1][0] + spans[-1][1] == begin:
                    spans[-1][1] += size
                else:
                    spans.append([begin, size])
            by_rank.append(spans)
        most = max(map(len, by_rank))
        rows = np.array([spans + [[0, 0]] * (most - len(spans)) for spans in by_rank], dtype=np.int64)
        return [(rows[:, place, 0], rows[:, place, 1]) for place in range(most)]


@rule("ragged_all_to_all")
def ragged_all_to_all(low: Lowering, equation: Any, x: Any, output: Any, *numbers: Any) -> Value:
    """Each member is sent an array with its piece where that goes, and zeros around it; what comes is added up."""
    x, along, room = low.tensor(x), along_of(equation.params), output.shape[0]
    dtype = equation.outvars[0].aval.dtype
    pieces = Pieces.of(low.build, along, numbers)
    pieces.require_fitting(x.shape[0], room)
    zeros = low.full(output.shape, Known(np.zeros(1, dtype=numpy_of(dtype))))
    around = low.build.aten("constant_pad_nd", x, [0, 0] * (len(x.shape) - 1) + [room, room], 0)
    sent = []
    for place in range(pieces.members):
        goal = pieces.goals[:, place]
        moved = low.slice(around, 0, pieces.first[:, place] - goal + room, room)
        sent.append(_in_rows(low, goal, pieces.sizes[:, place], moved, zeros))
    rows, ones = low.build.aten("stack", tuple(sent), 0), (1,) * pieces.members
    came = low.build.collective("all_to_all_single", rows, rows.shape, along, output_splits=ones, input_splits=ones)
    made = low.build.aten("sum.dim_IntList", came, [0], False, dtype=in_graph(dtype))
    if (isinstance(output, Known) and output.uniform() == 0) or low.scalar(output) == 0:
        return made
    kept = low.tensor(output)
    for first, size in pieces.written():
        kept = _in_rows(low, first, size, made, kept)
    return kept


def _in_rows(low: Lowering, first: Numbers, size: Numbers, yes: Value, no: Value) -> Value:
    """One tensor in some rows, which may be others on each rank, and another one elsewhere."""
    rows = low.view(low.build.aten("arange", yes.shape[0], dtype="int64"), [yes.shape[0]] + [1] * (len(yes.shape) - 1))
    behind = low.build.aten("ge.Scalar", rows, per_rank(first))
    before = low.build.aten("lt.Scalar", rows, per_rank(first + size))
    return low.build.aten("where.self", low.build.aten("bitwise_and.Tensor", behind, before), yes, no)
