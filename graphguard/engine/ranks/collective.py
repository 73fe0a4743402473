"""Collectives on described tensors. A group's lanes are a row of an array [groups, size]; together the rows are all lanes.

What changes from member to member by equal steps becomes one more variable: summed for a reduction, the outermost of a dim for
a gather. So the cost does not grow with the ranks. Anything else is taken member by member, up to a cap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from graphguard.engine.algebra.merge import merged
from graphguard.engine.algebra.value import add, concat, cut, moved, scale, taken
from graphguard.engine.store.table import Table
from graphguard.engine.tensors.shape import reshape
from graphguard.engine.terms.lane import Lane, Lanes, collapse, equal
from graphguard.engine.terms.term import Factor, Index, Term, Undescribed, Value, Variable, extent, stride_order, substitute


class Groups(NamedTuple):
    """Each lane's group and its place there, beside the array of members."""

    members: Lanes  # [groups, size]
    group: Lanes
    place: Lanes

    @property
    def size(self) -> int:
        return int(self.members.shape[1])

    def each(self, table: Table) -> Iterator[Lanes]:
        """For each place in the groups, the lane that every lane sees there."""
        if table.over("members", self.size):
            raise Undescribed(f"what {self.size} ranks hold follows no pattern")
        for place in range(self.size):
            yield self.members[self.group, place]


def groups_of(members: Lanes) -> Groups:
    count = members.size
    if not np.array_equal(np.sort(members, axis=None), np.arange(count)):
        raise ValueError("every lane belongs to exactly one group")
    group, place = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    group[members], place[members] = np.indices(members.shape)
    return Groups(members, group, place)


def all_reduce(table: Table, value: Value, groups: Groups) -> Value:
    """The sum over the members of each group."""
    terms: list[Term] = []
    slow: list[Term] = []
    for term in value.terms:
        summed = _summed(table, term, groups)
        if summed is None:
            slow.append(term)
        else:
            settled = table.settle(summed)
            terms += [] if settled is None else [settled]
    result = Value(value.shape, merged(table, terms))
    if slow:
        rest = Value(value.shape, tuple(slow))
        result = add(table, [result, *(taken(table, rest, lanes) for lanes in groups.each(table))])
    return result


def all_gather(table: Table, value: Value, dim: int, groups: Groups) -> Value:
    """The members' tensors side by side along a dim, in the order of the group."""
    size = value.shape[dim]
    if not isinstance(size, int):
        return concat(table, [taken(table, value, lanes) for lanes in groups.each(table)], dim)
    terms: list[Term] = []
    for term in value.terms:
        gathered = _gathered(table, term, dim, size, groups)
        if gathered is not None:
            settled = table.settle(gathered)
            terms += [] if settled is None else [settled]
            continue
        for place, lanes in enumerate(groups.each(table)):
            there = taken(table, Value(value.shape, (term,)), lanes)
            terms += [moved(each, dim, place * size) for each in there.terms]
    return Value((*value.shape[:dim], size * groups.size, *value.shape[dim + 1 :]), merged(table, terms))


def reduce_scatter(table: Table, value: Value, dim: int, groups: Groups) -> Value:
    """Each member's part of the sum along a dim."""
    return own_part(table, all_reduce(table, value, groups), dim, groups)


def own_part(table: Table, value: Value, dim: int, groups: Groups) -> Value:
    """The part of a tensor at each lane's place in its group."""
    size = value.shape[dim]
    if not isinstance(size, int) or size % groups.size:
        raise Undescribed(f"a dim of {size} is not scattered evenly over {groups.size} ranks")
    part = size // groups.size
    start = collapse(groups.place * part)
    return cut(table, value, dim, start, collapse(start + part))


def all_to_all(table: Table, value: Value, groups: Groups) -> Value:
    """Part j of dim 0 goes to member j, which puts what it gets in the order of the senders."""
    rows = value.shape[0]
    if not all(isinstance(size, int) for size in value.shape) or rows % groups.size:
        raise Undescribed(f"a dim of {rows} is not exchanged evenly among {groups.size} ranks")
    rest = [int(size) for size in value.shape[1:]]
    part = int(rows) // groups.size
    table_of_parts = reshape(table, value, [1, groups.size, part, *rest])
    everyone = all_gather(table, table_of_parts, 0, groups)
    mine = own_part(table, everyone, 1, groups)
    return reshape(table, mine, [int(rows), *rest])


def average(table: Table, value: Value, groups: Groups) -> Value:
    return scale(all_reduce(table, value, groups), Fraction(1, groups.size))


# ---------------------------------------------------------------------- all lanes at once
@dataclass
class _Along:
    """A term whose positions go by equal steps from member to member."""

    term: Term  # at the first member of each group
    steps: list[list[int]]  # of each index of each factor
    weight: Lane  # summed over the members
    even: bool  # whether the weight is the same for all members


def _held(number: Lane, groups: Groups) -> Lanes:
    """A number by group and member."""
    return np.broadcast_to(np.asarray(number), groups.group.shape)[groups.members]


def _alike(number: Lane, groups: Groups) -> bool:
    if not isinstance(number, np.ndarray):
        return True
    held = number[groups.members]
    return bool((held == held[:, :1]).all())


def _along(term: Term, groups: Groups, ordered: bool) -> _Along | None:
    if not all(_alike(extent(span), groups) for span in term.ranges.values()):
        return None
    if not all(_alike(bound, groups) for span in term.box for bound in span):
        return None
    starts = {v: Index(((v, 1),), low) for v, (low, _) in term.ranges.items() if isinstance(low, np.ndarray)}
    factors = substitute(term.factors, starts)
    ranges = {v: (0, extent(span)) if v in starts else span for v, span in term.ranges.items()}
    offsets = [index.offset for factor in factors for index in factor.at]
    order = None if ordered else _order(offsets, groups)
    firsts, steps = [], []
    for offset in offsets:
        step = _step(offset, groups, order)
        if step is None:
            return None
        first = _held(offset, groups) if order is None else np.take_along_axis(_held(offset, groups), order, 1)
        firsts.append(collapse(first[:, 0][groups.group]))
        steps.append(step)
    at_first = iter(firsts)
    by_index = iter(steps)
    placed = tuple(f._replace(at=tuple(Index(i.terms, next(at_first)) for i in f.at)) for f in factors)
    rows = [[next(by_index) for _ in factor.at] for factor in placed]
    weights = _held(term.weight, groups)
    total = collapse(weights.sum(axis=1)[groups.group])
    even = bool((weights == weights[:, :1]).all())
    found = term.with_(factors=placed, ranges=ranges, weight=collapse(weights[:, 0][groups.group]) if even else 1)
    return _Along(found, rows, total, even)


def _order(offsets: list[Lane], groups: Groups) -> Lanes | None:
    """The order in which the members' positions grow, for what does not care about order."""
    for offset in offsets:
        if not _alike(offset, groups):
            return np.argsort(_held(offset, groups), axis=1, kind="stable")
    return None


def _step(offset: Lane, groups: Groups, order: Lanes | None) -> int | None:
    if _alike(offset, groups):
        return 0
    held = _held(offset, groups)
    if order is not None:
        held = np.take_along_axis(held, order, 1)
    steps = np.diff(held, axis=1)
    return int(steps[0, 0]) if (steps == steps[0, 0]).all() else None


def _summed(table: Table, term: Term, groups: Groups) -> Term | None:
    along = _along(term, groups, ordered=False)
    if along is None:
        return _placed_side_by_side(table, term, groups)
    if not any(step for row in along.steps for step in row):
        return along.term.with_(weight=along.weight)
    return _with_steps(table, along, groups)[0] if along.even else None


def _with_steps(table: Table, along: _Along, groups: Groups) -> tuple[Term, Variable]:
    """The term with the member as a variable."""
    variable = next(table.names)
    factors = []
    for factor, steps in zip(along.term.factors, along.steps, strict=True):
        at = []
        for index, step in zip(factor.at, steps, strict=True):
            terms = tuple(sorted([*index.terms, (variable, step)], key=stride_order)) if step else index.terms
            at.append(Index(terms, index.offset))
        factors.append(Factor(factor.atom, tuple(at), factor.power))
    ranges = {**along.term.ranges, variable: (0, groups.size)}
    return along.term.with_(factors=tuple(factors), ranges=ranges), variable


def _gathered(table: Table, term: Term, dim: int, size: int, groups: Groups) -> Term | None:
    low, high = term.box[dim]
    if not (equal(low, 0) and equal(high, size)):
        return None
    along = _along(term, groups, ordered=True)
    if along is None or not along.even:
        return None
    gathered, variable = _with_steps(table, along, groups)
    dims = (*gathered.dims[:dim], (variable, *gathered.dims[dim]), *gathered.dims[dim + 1 :])
    return gathered.with_(dims=dims, box=(*gathered.box[:dim], (0, size * groups.size), *gathered.box[dim + 1 :]))


def _placed_side_by_side(table: Table, term: Term, groups: Groups) -> Term | None:
    """A sum of tensors that are zero but for one part each, side by side: a gather of the parts."""
    different = [d for d, span in enumerate(term.box) if not all(_alike(bound, groups) for bound in span)]
    if len(different) != 1:
        return None
    (dim,) = different
    low, high = term.box[dim]
    size = extent((low, high))
    if not isinstance(size, int) or _step(low, groups, None) != size:
        return None
    parts = term.with_(box=(*term.box[:dim], (0, size), *term.box[dim + 1 :]))
    gathered = _gathered(table, parts, dim, size, groups)
    if gathered is None:
        return None
    start = collapse(_held(low, groups)[:, 0][groups.group])
    box = (start, collapse(start + size * groups.size))
    return gathered.with_(box=(*gathered.box[:dim], box, *gathered.box[dim + 1 :]))
