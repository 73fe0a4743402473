"""How many elements of a sum a step leaves, as a function of where it begins.

    Σ_j step[j - i],  j in [l, h)   is   relu(h - 1 - i)        where the step is 0 at l and below

So a sum over a part of the elements, and a number for those of which the step leaves all, are one count again.
"""

from __future__ import annotations

import numpy as np

from graphguard.engine.store.records import Records
from graphguard.engine.terms.definition import Part
from graphguard.engine.terms.lane import Lane, collapse, everywhere
from graphguard.engine.terms.term import IDX, ONE, STEP, Factor, Index, Term, Variable, bounds, combined, extent, substituted

_COUNT = ("function", "relu", (), 1)


def counted(records: Records, term: Term) -> Term:
    """The term with a count in the place of each sum that a step alone is in."""
    for variable in term.summed:
        step = _only_step(term, variable)
        count = None if step is None else _count(term, step, variable)
        if step is not None and count is not None:
            part = Part((0, ONE), (Factor(IDX, (count,)),))
            ranges = {v: span for v, span in term.ranges.items() if v != variable}
            atom, axes = records.definitions.define(_COUNT, [part], ranges, nonnegative=True)
            factors = tuple(factor for factor in term.factors if factor is not step)
            return counted(records, term.with_(factors=(*factors, Factor(atom, axes)), ranges=ranges))
    return term


def _only_step(term: Term, variable: Variable) -> Factor | None:
    """The step that alone mentions a variable, an element at a time."""
    found = [factor for factor in term.factors if variable in factor.variables()]
    if len(found) != 1 or found[0].atom is not STEP or found[0].power != 1:
        return None
    return found[0] if abs(dict(found[0].at[0].terms)[variable]) == 1 else None


def _count(term: Term, step: Factor, variable: Variable) -> Index | None:
    """How many elements the step leaves, where that is not below zero; None if there may be fewer than it would leave."""
    low, high = term.ranges[variable]
    index, stride = step.at[0], dict(step.at[0].terms)[variable]
    rest = Index(tuple(each for each in index.terms if each[0] != variable), index.offset)
    count = combined([rest, Index((), collapse(high - 1 if stride > 0 else -low))])
    _, most = bounds(count, term.ranges)
    return count if everywhere(most <= extent((low, high))) else None


def is_count(records: Records, factor: Factor) -> bool:
    definition = records.definitions.get(factor.atom)
    if definition is None or definition.name != "relu" or factor.power != 1 or len(definition.operands[0]) != 1:
        return False
    (product,) = definition.operands[0]
    alone = not product.extents and product.label == (0, ONE) and len(product.factors) == 1
    return alone and product.factors[0].atom is IDX and product.factors[0].power == 1


def position_of(records: Records, factor: Factor) -> Index:
    """Where a count is read: what is counted, if that is not below zero."""
    (product,) = records.definitions[factor.atom].operands[0]
    return substituted(product.factors[0].at[0], {-1 - n: index for n, index in enumerate(factor.at)})


def with_more(records: Records, term: Term, place: int, more: Lane) -> Term | None:
    """The term with so many elements more in a count; None if it may be below zero, where they would not be seen."""
    position = position_of(records, term.factors[place])
    least, _ = bounds(position, term.ranges)
    if not everywhere((least >= 0) | (np.asarray(more) == 0)) or not everywhere(more >= 0):
        return None
    part = Part((0, ONE), (Factor(IDX, (Index(position.terms, collapse(position.offset + more)),)),))
    atom, axes = records.definitions.define(_COUNT, [part], term.ranges, nonnegative=True)
    return term.with_(factors=(*term.factors[:place], Factor(atom, axes), *term.factors[place + 1 :]))
