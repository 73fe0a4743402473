"""Sums over more or fewer than they are over: what a mask adds, or leaves out, is zero."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from graphguard.engine.terms.lane import collapse, equal, everywhere, larger, smaller
from graphguard.engine.terms.term import IMPULSE, STEP, WINDOW, Factor, Index, Range, Term, Variable, bounds


def wider_ranges(
    factors: Sequence[Factor], ranges: Mapping[Variable, Range], variable: Variable, spans: Sequence[Range]
) -> Iterator[Mapping[Variable, Range]]:
    """The ranges with that of a summed variable widened to one of these, where a step or an impulse is 0 on all that is added:
    a causal row that is cut off behind its last key is summed over as many as the whole one."""
    masks = [f for f in factors if f.atom in (STEP, IMPULSE, WINDOW)]
    low, high = ranges[variable]
    for first, last in spans if masks else ():
        if (equal(low, first) and equal(high, last)) or not (everywhere(first <= low) and everywhere(high <= last)):
            continue
        added = [span for span in ((first, low), (high, last)) if not everywhere(span[0] == span[1])]
        if all(any(_is_zero_on(mask, {**ranges, variable: span}) for mask in masks) for span in added):
            yield {**ranges, variable: (first, last)}


def _is_zero_on(mask: Factor, ranges: Mapping[Variable, Range]) -> bool:
    """Whether a mask is 0 over all of these ranges, in lanes where they are not empty."""
    low, high = bounds(mask.at[0], ranges)
    empty = np.asarray(False)
    for first, last in ranges.values():
        empty = empty | np.asarray(last <= first)
    outside = ((low > 0) | (high < 0)) if mask.atom is IMPULSE else high <= 0
    return bool(np.all(np.asarray(outside) | empty))


def narrowed(term: Term) -> Term:
    """The term with its sums over no more than what its steps may leave: what is cut off is zero in every lane. So two sums
    under one mask are over the same, whichever of its zeros they were over. Not in normal form."""
    summed = set(term.summed)
    ranges = dict(term.ranges)
    for mask in (f for f in term.factors if f.atom is STEP):
        for variable, stride in mask.at[0].terms:
            if variable not in summed or abs(stride) != 1:
                continue
            rest = Index(tuple(each for each in mask.at[0].terms if each[0] != variable), mask.at[0].offset)
            reach = bounds(rest, ranges)[1]  # stride * variable + rest > 0, so stride * variable > -reach
            low, high = ranges[variable]
            low, high = (larger(low, collapse(1 - reach)), high) if stride == 1 else (low, smaller(high, reach))
            ranges[variable] = (smaller(low, high), high)
    same = all(equal(a, b) for v, span in ranges.items() for a, b in zip(span, term.ranges[v], strict=True))
    return term if same else term.with_(ranges=ranges)
