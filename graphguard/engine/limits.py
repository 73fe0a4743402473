"""How much the prover tries, and where it stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from graphguard.graph.ir import Node
from graphguard.graph.limits import Stop, Stops, limit, most

Reach = Mapping[Node, frozenset[str]]  # by operation, the outputs that are made from its results
At = Node | str | None  # what is being done: an operation is described, or an output is related


@dataclass(frozen=True)
class Limits:
    # of descriptions
    factors: int = limit(24, "products of more than {} factors")
    terms: int = limit(32, "sums of more than {} terms")
    terms_in_all: int = limit(128, "tensors put together from more than {} terms")
    cells: int = limit(64, "tensors in more than {} pieces")
    sum_parts: int = limit(8, "sums over more than {} elements, taken apart")
    product_elements: int = limit(8, "products of more than {} elements, taken apart")
    mask_parts: int = limit(8, "masks of more than {} pieces, taken apart")
    step_cases: int = limit(0, "masks by numbers in more than {} places, case by case")
    divisors: int = limit(4, "fractions of more than {} divisors")
    root_copies: int = limit(4, "roots to powers above {}")
    shares: int = limit(8, "functions of what ranks hold in more than {} different shares")
    members: int = limit(64, "groups of more than {} ranks that hold tensors without a pattern")
    # of tensors whose elements are taken one by one
    rows: int = limit(64, "reshapes of more than {} rows in pieces")
    strided_rows: int = limit(32, "steps through more than {} rows in pieces")
    index_runs: int = limit(256, "indices of more than {} pieces")
    constant_runs: int = limit(8, "constants of more than {} runs of numbers")
    number_runs: int = limit(64, "sorted numbers of more than {} runs")
    numbers: int = limit(4096, "known numbers of more than {} elements")
    sorted_elements: int = limit(64, "maxima over more than {} elements in another order")
    masked_elements: int = limit(1 << 22, "masks of more than {} elements")
    positive_elements: int = limit(1 << 20, "signs of sums of more than {} elements")
    nested_sums: int = limit(8, "bounds of more than {} sums in sums")
    # of sums that are written out
    steps: int = limit(24, "sums that are written out in more than {} steps")
    written_terms: int = limit(32, "sums that have more than {} terms when they are written out")
    written_power: int = limit(3, "sums to powers above {}, written out")
    crossings: int = limit(1, "more than {} pieces of tensors that end within rows of others")
    scattered: int = limit(1, "sums of more than {} elements that lie apart, compared one by one")
    work: int = limit(1000, "more than {} terms written out in vain for one output")
    operands: int = limit(4, "operands compared with more than {} of the sequential program's")
    astray: int = limit(40_000, "more than {} factors, for each class of ranks, in what is no part of any sequential tensor")
    # of relations
    ordered_dims: int = limit(4, "tiles of tensors of more than {} dims in another order")
    tiles: int = limit(64, "ranks that hold more than {} tiles side by side")
    ranks_apart: int = limit(8, "more than {} ranks described one by one")
    operations_apart: int = limit(12_000, "more than {} operations of ranks described one by one")
    # of what is told of operations
    candidates: int = limit(6, "more than {} sequential tensors that an operation's result is compared with", proves=False)
    summed_terms: int = limit(8, "results of more than {} terms, summed over ranks", proves=False)
    visits: int = limit(4000, "more than {} operations on the way to where a relation breaks", proves=False)
    pictures: int = limit(1000, "more than {} comparisons for what the operands of findings are", proves=False)
    listed: int = limit(40_000, "more than {} comparisons for the relations of all operations", proves=False)

    def for_many_pieces(self) -> Limits:
        """For programs whose rows go ways of their own: each of them is a piece. What was set otherwise stays."""
        return self._with(_MANY)

    def for_masks(self) -> Limits:
        """For programs that mask scores by large numbers: what is masked is described by itself."""
        return self._with({"step_cases": 1, "terms": 64, "terms_in_all": 256, "written_terms": 128})

    def for_paths(self) -> Limits:
        """For the same along the path of a sample, of which there are several."""
        return self._with(_ON_PATHS)

    def _with(self, others: Mapping[str, int]) -> Limits:
        default = Limits()
        return replace(self, **{name: most for name, most in others.items() if getattr(self, name) == getattr(default, name)})


_ON_PATHS = {
    "terms": 128, "terms_in_all": 512, "crossings": 64, "steps": 100, "written_terms": 128, "scattered": 4096, "work": 5000,
}  # fmt: skip
_MANY = {
    "terms": 256, "terms_in_all": 1024, "cells": 1024, "crossings": 1024, "steps": 200, "written_terms": 512,
    "scattered": 8192, "work": 20_000,
}  # fmt: skip


_OF_WRONG_RANKS = {"astray": 2000, "work": 100}  # what is not proved soon then is not to be proved


class ProofStops(Stops):
    """What was reached, and what was written out in vain, is kept with what was done then: trouble with one output leaves
    others as they are.

    are_wrong: whether an execution shows that the ranks are wrong. It is asked once, where much is done in vain: of such ranks
        less is tried, which is always sound."""

    limits: Limits

    def __init__(
        self, limits: Limits | None = None, reach: Callable[[], Reach] = dict, are_wrong: Callable[[], bool] | None = None
    ):
        super().__init__(Limits() if limits is None else limits)
        self._find_wrong = are_wrong
        self.at: At = None
        self._reached: dict[tuple[str, At], int | None] = {}
        self._find_reach = reach
        self._written = 0  # terms, in vain
        self._written_for: Counter[str] = Counter()  # each output; but for what is not told apart yet
        self._not_told_apart: list[tuple[At, int]] = []

    @cached_property
    def _reach(self) -> Reach:
        return self._find_reach()

    @cached_property
    def _are_wrong(self) -> bool:
        return self._find_wrong is not None and self._find_wrong()

    def allowed(self, limit: str, needed: int) -> int:
        """The limit that holds where so much is needed."""
        most, of_wrong = getattr(self.limits, limit), _OF_WRONG_RANKS[limit]
        return of_wrong if of_wrong < min(most, needed) and self._are_wrong else most

    @cached_property
    def _every(self) -> frozenset[str]:
        """All outputs that some operation serves."""
        return frozenset[str]().union(*self._reach.values())

    def note(self, limit: str, needed: int | None = None) -> None:
        self._reached[limit, self.at] = most(self._reached.get((limit, self.at)), needed)

    def on_the_way_to(self, paths: Sequence[str]) -> tuple[Stop, ...]:
        """The limits that were reached for some outputs."""
        found: dict[str, tuple[int | None, dict[str, None]]] = {}
        for (name, at), needed in self._reached.items() if paths else ():
            served = self._served(at, paths)
            outputs = [path for path in paths if path in served]
            if outputs:
                before, others = found.get(name, (None, {}))
                found[name] = most(before, needed), {**others, **dict.fromkeys(outputs)}
        return tuple(self.stop(name, *each) for name, each in found.items())

    def _served(self, at: At, every: Iterable[str]) -> Iterable[str]:
        """The outputs that something is done for; what belongs to none is done for every one."""
        return (at,) if isinstance(at, str) else every if at is None else self._reach.get(at, every)

    # ------------------------------------------------------------------ what is written out in vain
    def allows(self, terms: int) -> bool:
        """Whether so many terms may be written out: not, if too many were for every output that they would be for."""
        most = self.allowed("work", self._written + terms)
        if self._written + terms <= most:
            return True
        every = self._every
        for at, written in self._not_told_apart:
            self._written_for.update(dict.fromkeys(self._served(at, every), written))
        self._not_told_apart.clear()
        if any(self._written_for[path] + terms <= most for path in self._served(self.at, every)):
            return True
        self.note("work")
        return False

    def charge(self, terms: int) -> None:
        """So many terms were written out, and showed nothing."""
        self._written += terms
        self._not_told_apart.append((self.at, terms))
