"""Partial sums under one name. What a rank holds of a sum of several products is one atom, of which it is known what it adds up
to, wherever the sum over the members is one product of the sequential program.

Without it, what follows would be multiplied out: a gradient that is left a sum over ranks passes one norm after another, and
each makes two terms of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from graphguard.engine.algebra.merge import merged
from graphguard.engine.algebra.sums import folded, one_box, shared, sum_of
from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import equal, key, varies
from graphguard.engine.terms.part import Axis, Whole
from graphguard.engine.terms.term import (
    Factor,
    Index,
    Range,
    Term,
    Undescribed,
    Value,
    Variable,
    extent,
    stride_order,
    substitute,
    substituted,
)


class _Moves(NamedTuple):
    """How the positions that differ between lanes go from member to member: where each begins, and its step."""

    members: int
    steps: Mapping[object, tuple[int, int]]


def together(table: Table, value: Value) -> Value:
    """The same tensor as one atom, if its terms are parts of one product; else as it is."""
    if len(value.terms) < 2 or not one_box(value.terms) or not all(_is_even(term) for term in value.terms):
        return value
    grounded = [_from_zero(term) for term in value.terms]
    moves = _moves(grounded)
    if moves is None:
        return value
    try:
        whole = folded(table, Value(value.shape, _over_members(table, grounded, moves)))
        if len(whole.terms) != 1 or not _is_lane_free(whole.terms[0]):
            return value
        part = sum_of(table, [table.filed(term) for term in value.terms])
    except Undescribed:
        return value
    single = len(part.factors) == 1 and one_box([value.terms[0], part, whole.terms[0]])
    known = _known(part, whole.terms[0], moves) if single else None
    if known is None:
        return value
    table.sums.note_whole(part.factors[0].atom, known)
    return Value(value.shape, (part,))


def _is_even(term: Term) -> bool:
    """Whether all lanes hold as much of it, in the same place."""
    sizes = [extent(term.ranges[v]) for v in term.summed] + [bound for span in term.box for bound in span]
    return equal(term.weight, 1) and not any(varies(size) for size in sizes)


def _is_lane_free(term: Term) -> bool:
    offsets = [index.offset for factor in term.factors for index in factor.at]
    return not term.summed and equal(term.weight, 1) and not any(varies(number) for number in offsets)


def _from_zero(term: Term) -> Term:
    """With what differs between lanes in the positions alone: sums start at 0."""
    starts = {v: Index(((v, 1),), term.ranges[v][0]) for v in term.summed if varies(term.ranges[v][0])}
    ranges: dict[Variable, Range] = {v: (0, extent(span)) if v in starts else span for v, span in term.ranges.items()}
    return term.with_(factors=substitute(term.factors, starts), ranges=ranges)


def _moves(terms: Sequence[Term]) -> _Moves | None:
    """The members, in the order of their positions, if they lie at equal distances."""
    offsets = {key(i.offset): i.offset for term in terms for f in term.factors for i in f.at if varies(i.offset)}
    if not offsets:
        return None
    rows = np.unique(np.stack([np.asarray(offset) for offset in offsets.values()], axis=1), axis=0)
    steps = np.diff(rows, axis=0)
    if not (steps == steps[0]).all():
        return None
    return _Moves(len(rows), {name: (int(rows[0, n]), int(steps[0, n])) for n, name in enumerate(offsets)})


def _over_members(table: Table, terms: Sequence[Term], moves: _Moves) -> tuple[Term, ...]:
    """The sum over all members."""
    member = next(table.names)

    def moving(index: Index) -> Index:
        if not varies(index.offset):
            return index
        first, step = moves.steps[key(index.offset)]
        return Index(tuple(sorted([*index.terms, (member, step)], key=stride_order)) if step else index.terms, first)

    sums = []
    for term in terms:
        factors = tuple(f._replace(at=tuple(moving(index) for index in f.at)) for f in term.factors)
        settled = table.settle(term.with_(factors=factors, ranges={**term.ranges, member: (0, moves.members)}))
        sums += [] if settled is None else [settled]
    return merged(table, sums)


def _known(part: Term, whole: Term, moves: _Moves) -> Whole | None:
    """What is known of a part, at the positions where it was found; None if these are not told apart by its axes."""
    names = shared(whole, part)
    if names is None or len(part.factors) != 1 or not equal(part.weight, 1):
        return None
    axes: list[Axis] = []
    places: dict[Variable, Index] = {}
    for number, index in enumerate(part.factors[0].at):
        found = _axis(index, part.ranges, moves)
        if found is None:
            return None
        axes.append(found)
        for variable, _ in index.terms:
            if variable in places:  # an atom with two axes, of which this is known where they are the same position
                return None
            places[variable] = Index(((-1 - number, 1),), -index.offset)
    factors = []
    for factor in whole.factors:
        at = [substituted(index, names) for index in factor.at]
        if any(v not in places for index in at for v, _ in index.terms):
            return None
        factors.append(Factor(factor.atom, tuple(substituted(index, places) for index in at), factor.power))
    return Whole(moves.members, tuple(axes), whole.coefficient / part.coefficient, tuple(factors))


def _axis(index: Index, ranges: Mapping[Variable, Range], moves: _Moves) -> Axis | None:
    if varies(index.offset):
        step = moves.steps.get(key(index.offset))
        return None if index.terms or step is None else Axis(step[0], None, step[1])
    if not index.terms:
        return Axis(int(index.offset), int(index.offset))
    (variable, stride), *others = index.terms
    low, high = ranges[variable]
    if others or stride != 1 or varies(low) or varies(high):
        return None
    return Axis(int(low + index.offset), int(high + index.offset) - 1)
