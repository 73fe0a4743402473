"""Positions that a mask of positions leaves, zeros elsewhere: what each rank looks up in its rows of a table.

Every number is known, so they are taken as runs along the one dim on which they depend: ramps, whose numbers follow each other,
and runs of equal numbers. Runs of different lanes are one term if as many ramps come before them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from graphguard.engine.algebra.merge import merged
from graphguard.engine.store.table import Table
from graphguard.engine.tensors.known_numbers import Array, numbers_of
from graphguard.engine.tensors.ops import Ops
from graphguard.engine.terms.lane import Lane, collapse
from graphguard.engine.terms.term import IMPULSE, ONE, STEP, Factor, Index, Range, Term, Value


class Run(NamedTuple):
    """Elements from `low` to `high` of a dim: the number `first` and those that follow it, or `first` everywhere."""

    low: int
    high: int
    first: int
    ramp: bool


@dataclass(frozen=True)
class PositionRuns:
    """By lane, the runs of numbers along a dim."""

    along: int
    lanes: list[list[Run]]

    def hot(self, table: Table, shape: Sequence[Lane], size: int, dim: int) -> Value:
        """[number = v] for v in [0, size) along a new dim."""
        alike: dict[tuple[bool, int, int], dict[int, Run]] = defaultdict(dict)
        for lane, runs in enumerate(self.lanes):
            ramps = equals = 0
            for run in runs:
                alike[run.ramp, ramps, 0 if run.ramp else equals][lane] = run
                ramps, equals = (ramps + 1, 0) if run.ramp else (ramps, equals + 1)
        terms = [table.settle(self._term(table, shape, size, dim, runs)) for runs in alike.values()]
        whole = (*shape[:dim], size, *shape[dim:])
        return Value(whole, merged(table, [term for term in terms if term is not None]))

    def _term(self, table: Table, shape: Sequence[Lane], size: int, dim: int, runs: Mapping[int, Run]) -> Term:
        present = [runs.get(lane) for lane in range(len(self.lanes))]
        first = next(iter(runs.values()))

        def number(of: Any) -> Lane:
            return collapse(np.array([of(run or first) for run in present], dtype=np.int64))

        variables, row = [next(table.names) for _ in shape], next(table.names)
        ranges: dict[int, Range] = {v: (0, each) for v, each in zip([*variables, row], [*shape, size], strict=True)}
        box: list[Range] = [(0, each) for each in shape]
        here, box[self.along] = variables[self.along], (number(lambda run: run.low), number(lambda run: run.high))
        if first.ramp:
            ranges[here] = number(lambda run: run.first), number(lambda run: run.first + run.high - run.low)
            at = Index(((row, 1), (here, -1)))
        else:
            ranges[here] = 0, number(lambda run: run.high - run.low)
            at = Index(((row, 1),), number(lambda run: -run.first))
        dims = [(v,) for v in variables]
        dims.insert(dim, (row,))
        box.insert(dim, (0, size))
        weight = collapse(np.array([run is not None for run in present], dtype=np.int64))
        return Term(ONE, (Factor(IMPULSE, (at,)),), ranges, tuple(dims), tuple(box), weight)


def masked_positions(ops: Ops, value: Value, size: int) -> PositionRuns | None:
    """The runs of a tensor that is made of positions and masks of positions, if all lie in [0, size) in every lane."""
    if not any(factor.atom is STEP for term in value.terms for factor in term.factors):
        return None
    numbers = numbers_of(ops, [value])
    if numbers is None or not numbers[0][0].size:
        return None
    lanes = numbers[0]
    varying = [dim for dim in range(len(value.shape)) if any((each != each.take([0], dim)).any() for each in lanes)]
    if len(varying) > 1 or any(each.min() < 0 or each.max() >= size for each in lanes):
        return None
    along = varying[0] if varying else 0
    corner = tuple(slice(None) if dim == along else 0 for dim in range(len(value.shape)))
    runs = [_runs(each[corner]) for each in lanes]
    return None if ops.table.over("number_runs", max(map(len, runs))) else PositionRuns(along, runs)


def _runs(row: Array) -> list[Run]:
    """The longest runs; one number by itself is a ramp, unless equal ones are beside it."""
    found, low = [], 0
    while low < len(row):
        gap = int(row[low + 1] - row[low]) if low + 1 < len(row) else None
        high = low + 1
        while gap in (0, 1) and high < len(row) and row[high] - row[high - 1] == gap:
            high += 1
        found.append(Run(low, high, int(row[low]), gap != 0))
        low = high
    return found
