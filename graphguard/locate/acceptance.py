"""Whether an output that was computed anew is right, and which factor would make it so."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property

import torch

from graphguard.graph.ir import Mesh, Value
from graphguard.graph.placement import SUM, Placements
from graphguard.oracle.clean import Observed, are_shares, fits, worst
from graphguard.oracle.grid import Grid, cut
from graphguard.oracle.outcome import Output, local_reference
from graphguard.oracle.reference import Reference
from graphguard.oracle.trial import Trial
from graphguard.relation.expectation import Expectation

Tensors = Sequence[torch.Tensor]
_MOST_CANDIDATES = 64
_SIMPLE = 4096  # the largest product of the two numbers of a fraction that a program may have by mistake
_NEAR = 1e-6


class Acceptance:
    """What one output should be, in one trial."""

    def __init__(self, path: str, value: Value, mesh: Mesh, trial: Trial, expectation: Expectation | None):
        self.output = Output(path, value.dtype, mesh, [trial])
        self.trial, self.expectation = trial, expectation
        self.grid = self.output.grid or Grid(Mesh.of({"rank": len(self.output.ranks)}), self.output.ranks)

    @property
    def claimed(self) -> bool:
        return self.output.claimed

    @cached_property
    def local_parts(self) -> list[Reference] | None:
        """By rank, what code says that it should have."""
        graphs = None if self.expectation is None or self.output.grid is None else self.expectation.graphs
        if graphs is None:
            return None
        return [local_reference(self._reference, graphs[rank]) for rank in self.output.ranks]

    @property
    def _reference(self) -> Reference:
        return self.trial.references[self.output.path]

    @cached_property
    def placements(self) -> list[Placements]:
        """As which the output is right: the stated ones, else all that the shapes allow, those without sums first."""
        if self.expectation is not None and self.output.grid is not None:
            return [self.output.on_grid(self.expectation)]
        sample = self.output.sample(self.trial)
        every = self.grid.candidates(self._reference.whole.shape)[:_MOST_CANDIDATES]
        return [placements for placements in every if fits(self.grid, placements, sample)]

    @cached_property
    def _was_sum(self) -> bool:
        return self._is_right(self.output.sample(self.trial).tensors) is True

    def judge(self, tensors: list[torch.Tensor]) -> bool | None:
        """None if it is wrong; else whether it is right only as a sum over ranks, which it was not before, and nothing asks
        for one."""
        found = self._is_right(tensors)
        return None if found is None else found and not self._was_sum

    def _is_right(self, tensors: list[torch.Tensor]) -> bool | None:
        if self.local_parts is not None:
            return False if all(part.fits(t) for part, t in zip(self.local_parts, tensors, strict=True)) else None
        sample = Observed(self._reference, tensors)
        for placements in self.placements:
            if self._holds(placements, sample):
                return self.expectation is None and SUM in placements
        return None

    def _holds(self, placements: Placements, sample: Observed) -> bool:
        return worst(self.grid, placements, sample) <= 1 and not are_shares(self.grid, placements, [sample])

    def factors(self, once: Tensors, twice: Tensors) -> list[Fraction]:
        """By what something may have to be multiplied for the output to be right, which is `once` as it is, and `twice` when
        that is doubled: if it depends on it, or on its inverse, as a straight line does."""
        if self.local_parts is not None:
            return _solved([part.whole for part in self.local_parts], once, twice)
        for placements in self.placements:
            before, after = self.grid.reduced(list(once), placements), self.grid.reduced(list(twice), placements)
            if before is not None and after is not None:
                spans = (self.grid.spans(self._reference.whole.shape, placements, lane) for lane in range(len(once)))
                found = _solved([cut(self._reference.whole, each) for each in spans], before, after)
                if found:
                    return found
        return []


def _solved(wanted: Tensors, once: Tensors, twice: Tensors) -> list[Fraction]:
    if any(each.shape != other.shape for each, other in zip(wanted, once, strict=True)):
        return []
    if any(tensor.is_complex() for tensor in (*wanted, *once)):
        return []
    goal, before, after = (torch.cat([t.reshape(-1).to(torch.float64) for t in ts]) for ts in (wanted, once, twice))
    known = torch.isfinite(goal)
    step, way = (after - before)[known], (goal - before)[known]
    weight = torch.dot(step, step)
    if not bool(weight > 0):
        return []
    more = float(torch.dot(step, way) / weight)
    if not bool((way - more * step).abs().max() <= _NEAR * goal[known].abs().max()) or abs(more) < _NEAR:
        return []
    straight, inverse = _simple(1 + more), None if more == 2 else _simple(1 / (1 - more / 2))
    return [factor for factor in (straight, inverse) if factor is not None]


def _simple(number: float) -> Fraction | None:
    """A fraction of small numbers, or a power of two, as scales of losses are."""
    if number == 0 or abs(number) > 2**24:
        return None
    fraction = (
        Fraction(number).limit_denominator(_SIMPLE) if abs(number) >= 1 else 1 / Fraction(1 / number).limit_denominator(_SIMPLE)
    )
    top, bottom = abs(fraction.numerator), fraction.denominator
    small = top * bottom <= _SIMPLE or (top & (top - 1) == 0 and bottom & (bottom - 1) == 0)
    return fraction if small and abs(float(fraction) - number) <= _NEAR * abs(number) else None
