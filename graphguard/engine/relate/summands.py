"""Which sums over ranks are sums of true parts.

Nothing that one rank adds may be taken away by another: the ranks' terms add up without cancelling, so that the sum of their
sizes is the size of their sum. And the ranks must have parted something. A term is parted if its ranges, boxes or positions
differ between ranks, or if one rank alone has it. Where all terms are the same on several ranks but for a number, each rank has
copies, not parts. Where a sum is stated, copies count as parts if each is a whole one of those that the sequential value counts
(3 x is x + x + x), or if they depend on no input: 4 elements are 2 and 2, and nothing in a number shows what it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np

from graphguard.engine.algebra.alike import same_term
from graphguard.engine.algebra.merge import merged
from graphguard.engine.algebra.value import same, taken
from graphguard.engine.ranks.collective import Groups, all_reduce
from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import Lane, Lanes, collapse
from graphguard.engine.terms.term import SPECIAL, Atom, Term, Undescribed, Value


class Summands(Enum):
    """What ranks hold whose sum is an output."""

    PARTS = "parts"
    COPIES = "copies"
    CANCELLING = "cancelling"
    UNKNOWN = "unknown"


def summands(table: Table, value: Value, summed: Sequence[Groups], averaged: Sequence[Groups], stated: bool) -> Summands:
    """What the lanes hold whose sum or mean over groups, one axis of the mesh after the other, is an output. A mean of copies
    is what it says."""
    try:
        if cancel(table, value, [*summed, *averaged]):
            return Summands.CANCELLING
        if any(_are_copies(table, value, groups, stated) for groups in summed):
            return Summands.COPIES
        return Summands.PARTS
    except Undescribed:
        return Summands.UNKNOWN


def cancel(table: Table, value: Value, along: Sequence[Groups]) -> bool:
    """Whether something that a lane adds is taken away by another one."""
    total, sizes = value, _sizes(table, value)
    for groups in along:
        total, sizes = all_reduce(table, total, groups), all_reduce(table, sizes, groups)
    return not same(_sizes(table, total), sizes)


def _sizes(table: Table, value: Value) -> Value:
    """The value with all numbers before its products above zero."""
    positive = [term.with_(coefficient=abs(term.coefficient), weight=_size(term.weight)) for term in value.terms]
    return Value(value.shape, merged(table, positive))


def _size(weight: Lane) -> Lane:
    return collapse(np.abs(weight)) if isinstance(weight, np.ndarray) else abs(weight)


# ---------------------------------------------------------------------- copies
def _are_copies(table: Table, value: Value, groups: Groups, stated: bool) -> bool:
    if not value.terms or not all(_is_copied(table, term, groups) for term in value.terms):
        return False
    return not (stated and all(_counts(table, term, groups) for term in value.terms))


def _is_copied(table: Table, term: Term, groups: Groups) -> bool:
    """Whether members of some group have the term alike, but for a number."""
    weights = _by_member(term.weight, groups)
    if int((weights != 0).sum(axis=1).max()) < 2:
        return False
    there = collapse(np.asarray(np.broadcast_to(np.asarray(term.weight), groups.group.shape) != 0, dtype=np.int64))
    alike = term.with_(weight=there)
    seen = taken(table, Value((), (alike,)), _first_that_has_it(weights, groups)).terms
    return len(seen) == 1 and same_term(seen[0], alike)


def _first_that_has_it(weights: Lanes, groups: Groups) -> Lanes:
    """For each lane, the first member of its group with a share; for one without, itself."""
    first: Lanes = groups.members[np.arange(len(weights)), np.argmax(weights != 0, axis=1)][groups.group]
    has = weights[groups.group, groups.place] != 0
    return np.where(has, first, np.arange(len(has), dtype=np.int64))


def _by_member(weight: Lane, groups: Groups) -> Lanes:
    return np.broadcast_to(np.asarray(weight), groups.group.shape)[groups.members]


def _counts(table: Table, term: Term, groups: Groups) -> bool:
    """Whether each copy is one of several that the sum counts, or a number, of which that is not known."""
    if not any(_depends_on_inputs(table, factor.atom, set()) for factor in term.factors):
        return True
    for members in _by_member(term.weight, groups):
        total = term.coefficient * int(members.sum())
        if any(total.denominator % (term.coefficient * int(weight)).denominator for weight in members):
            return False
    return True


def _depends_on_inputs(table: Table, atom: Atom, seen: set[int]) -> bool:
    if atom in SPECIAL or atom.kind in ("number", "constant") or atom.id in seen:
        return False
    seen.add(atom.id)
    definition = table.definitions.get(atom)
    if definition is None:
        return True
    factors = (factor for operand in definition.operands for product in operand for factor in product.factors)
    return any(_depends_on_inputs(table, factor.atom, seen) for factor in factors)
