"""One order of summands for all lanes. A ring adds up its blocks in another order on each rank; a sum has none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphguard.engine.terms.lane import Lane, Lanes, at_lane, collapse, kinds
from graphguard.engine.terms.term import Factor, Index, Term

_Numbers = np.ndarray[tuple[int, int], np.dtype[np.int64]]


def numbers_of(term: Term, lanes: int) -> _Numbers:
    """Whether a lane lacks the term, then its box, its offsets, and the ends of its ranges, lane by lane."""
    ends = [high for _, high in term.ranges.values()]
    held = [np.equal(term.weight, 0), *_held(term), *ends]
    return np.stack([np.broadcast_to(np.asarray(number, dtype=np.int64), (lanes,)) for number in held])


def start_of(term: Term) -> tuple[int, ...]:
    """The numbers of the first lane, by which terms are sorted."""
    return tuple(at_lane(number, 0) for number in _held(term))


def _held(term: Term) -> list[Lane]:
    return [*(b for span in term.box for b in span), *(i.offset for factor in term.factors for i in factor.at)]


def with_numbers(term: Term, numbers: _Numbers) -> Term:
    """The term with another box, other offsets and other ranges, which begin at 0, in the lanes that have it."""
    rest = iter(numbers[1:])

    def following() -> Lane:
        return collapse(next(rest))

    weight = int(np.max(term.weight))  # the one that is not 0
    box = tuple((following(), following()) for _ in term.box)
    factors = tuple(Factor(f.atom, tuple(Index(i.terms, following()) for i in f.at), f.power) for f in term.factors)
    ranges = {v: (0, following()) for v in term.ranges}
    return term.with_(box=box, factors=factors, ranges=ranges, weight=collapse(weight * (1 - numbers[0])))


def sorted_by_lane(held: Sequence[_Numbers]) -> list[_Numbers] | None:
    """The same numbers in each lane, those of the terms in ascending order; None if they are."""
    stacked = np.stack(held)  # terms, numbers, lanes
    lanes, kind = kinds(stacked.reshape(-1, stacked.shape[2]))
    order = np.array([np.lexsort(stacked[:, ::-1, lane].T) for lane in lanes])
    if (order == order[0]).all():
        return None
    return [np.stack([stacked[order[k, place], :, lane] for k, lane in enumerate(lanes)], axis=1)[:, kind]
            for place in range(len(held))]  # fmt: skip


def kinds_in(terms: Sequence[Term], more: Sequence[Lane] = ()) -> tuple[list[int], Lanes]:
    """The kinds of lanes that there are, by all numbers of some terms."""
    numbers = [(term.weight, *_held(term), *(bound for span in term.ranges.values() for bound in span)) for term in terms]
    return kinds([*(number for each in numbers for number in each), *more])


def lanes_in(terms: Sequence[Term]) -> int | None:
    """How many lanes there are, if any number differs between them."""
    for term in terms:
        for number in (term.weight, *_held(term), *(bound for span in term.ranges.values() for bound in span)):
            if isinstance(number, np.ndarray):
                return len(number)
    return None
