"""Collectives on described tensors. A group's lanes are a row of an array [groups, size]; together the rows are all lanes.

What all members of a group hold alike, and what continues from member to member in one place, is handled for all lanes at
once. Anything else is taken member by member, up to a cap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from graphguard.engine.lane import Lane, Lanes, collapse, equal
from graphguard.engine.merge import merged
from graphguard.engine.monomial import Monomial, Range, Undescribed, Variable
from graphguard.engine.placed import Placed
from graphguard.engine.table import Table
from graphguard.engine.value import Value, add, concat, cut, scale, taken

MOST_MEMBERS = 64


class Groups(NamedTuple):
    """Each lane's group and its place there, beside the array of members."""

    members: Lanes  # [groups, size]
    group: Lanes
    place: Lanes

    @property
    def size(self) -> int:
        return int(self.members.shape[1])

    def each(self) -> Iterator[Lanes]:
        """For each place in the groups, the lane that every lane sees there."""
        if self.size > MOST_MEMBERS:
            raise Undescribed(f"what {self.size} ranks hold follows no pattern")
        for place in range(self.size):
            yield self.members[self.group, place]


def groups_of(members: Lanes) -> Groups:
    count = members.size
    if sorted(members.reshape(-1).tolist()) != list(range(count)):
        raise ValueError("every lane belongs to exactly one group")
    group, place = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    for row, lanes in enumerate(members):
        group[lanes], place[lanes] = row, np.arange(len(lanes))
    return Groups(members, group, place)


def all_reduce(table: Table, value: Value, groups: Groups) -> Value:
    """The sum over the members of each group."""
    terms: list[Placed] = []
    slow: list[Placed] = []
    for term in value.terms:
        summed = _summed_at_once(table, term, groups)
        (slow if summed is None else terms).append(term if summed is None else summed)
    result = Value(value.shape, merged(table, terms))
    if slow:
        rest = Value(value.shape, tuple(slow))
        result = add(table, [result, *(taken(rest, lanes) for lanes in groups.each())])
    return result


def all_gather(table: Table, value: Value, dim: int, groups: Groups) -> Value:
    """The members' tensors side by side along a dim, in the order of the group."""
    if len(value.terms) == 1:
        gathered = _gathered_at_once(value, dim, groups)
        if gathered is not None:
            return gathered
    return concat(table, [taken(value, lanes) for lanes in groups.each()], dim)


def reduce_scatter(table: Table, value: Value, dim: int, groups: Groups) -> Value:
    """Each member's part of the sum along a dim."""
    size = value.shape[dim]
    if not isinstance(size, int) or size % groups.size:
        raise Undescribed(f"a dim of {size} is not scattered evenly over {groups.size} ranks")
    part = size // groups.size
    start = collapse(groups.place * part)
    return cut(all_reduce(table, value, groups), dim, start, collapse(start + part))


def average(table: Table, value: Value, groups: Groups) -> Value:
    return scale(all_reduce(table, value, groups), Fraction(1, groups.size))


# ---------------------------------------------------------------------- all lanes at once
def _alike(number: Lane, groups: Groups) -> bool:
    """Whether the members of each group agree on a number."""
    if not isinstance(number, np.ndarray):
        return True
    held = number[groups.members]
    return bool((held == held[:, :1]).all())


def _differing(term: Placed, groups: Groups) -> list[Variable] | None:
    """The variables whose ranges differ within a group; None if anything else does."""
    monomial = term.monomial
    numbers = [bound for span in term.box for bound in span]
    numbers += [index.offset for factor in monomial.factors for index in factor.at]
    if not all(_alike(number, groups) for number in numbers):
        return None
    return [v for v, span in monomial.ranges.items() if not all(_alike(bound, groups) for bound in span)]


def _joined(span: Range, groups: Groups, in_order: bool) -> Range | None:
    """The union of the members' ranges, if they abut: in the order of the group, or in any."""
    low, high = (np.broadcast_to(np.asarray(bound), groups.group.shape)[groups.members] for bound in span)
    if not in_order:
        order = np.argsort(low, axis=1, kind="stable")
        low, high = np.take_along_axis(low, order, 1), np.take_along_axis(high, order, 1)
    if not (high[:, :-1] == low[:, 1:]).all():
        return None
    return collapse(low[:, 0][groups.group]), collapse(high[:, -1][groups.group])


def _summed_at_once(table: Table, term: Placed, groups: Groups) -> Placed | None:
    monomial, differing = term.monomial, _differing(term, groups)
    if differing == []:
        return replace(term, monomial=replace(monomial, coefficient=monomial.coefficient * groups.size))
    if differing is None or len(differing) > 1 or differing[0] not in monomial.summed:
        return None
    span = _joined(monomial.ranges[differing[0]], groups, in_order=False)
    if span is None:
        return None
    return replace(term, monomial=table.fold(replace(monomial, ranges={**monomial.ranges, differing[0]: span})))


def _gathered_at_once(value: Value, dim: int, groups: Groups) -> Value | None:
    (term,) = value.terms
    monomial, differing = term.monomial, _differing(term, groups)
    size = value.shape[dim]
    if not differing or len(differing) > 1 or not isinstance(size, int) or not _covers(term.box[dim], size):
        return None
    (variable,) = differing
    span = _joined(monomial.ranges[variable], groups, in_order=True)
    if span is None:
        return None
    if monomial.dims[dim]:
        if monomial.dims[dim][0] != variable:
            return None
        dims = monomial.dims
    else:
        if variable not in monomial.summed or not monomial.is_point(variable):
            return None
        dims = (*monomial.dims[:dim], (variable,), *monomial.dims[dim + 1 :])
    whole = Monomial(monomial.coefficient, monomial.factors, {**monomial.ranges, variable: span}, dims)
    total = size * groups.size
    box = (*term.box[:dim], (0, total), *term.box[dim + 1 :])
    return Value((*value.shape[:dim], total, *value.shape[dim + 1 :]), (Placed(whole, box),))


def _covers(span: Range, size: int) -> bool:
    return equal(span[0], 0) and equal(span[1], size)
