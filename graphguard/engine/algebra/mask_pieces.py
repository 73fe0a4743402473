"""Masks of local positions over tensors in pieces: where the pieces lie apart, a mask counts their elements in a row.

A rank that has positions 0, 1, 6 and 7 masks them as 0, 1, 2 and 3. Its pieces may have become one variable of two elements,
six apart in the tensor and two apart in the mask. Such a term is taken apart: in each piece the two go side by side, and most
masks are settled there.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphguard.engine.algebra.value import cut_term
from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import varies
from graphguard.engine.terms.term import FIRST_ID, STEP, Index, Term, Variable, extent, substitute


def split_by_steps(table: Table, term: Term) -> Iterator[Term]:
    """The term, or its pieces where a step and a tensor beside it count differently."""
    variable = _crooked(table, term) if any(factor.atom is STEP for factor in term.factors) else None
    if variable is None:
        yield term
        return
    for piece in _pieces(term, variable):
        settled = table.settle(piece)
        if settled is not None:
            yield from split_by_steps(table, settled)


def _crooked(table: Table, term: Term) -> Variable | None:
    """A variable of a few elements that counts pieces: beside the same inner variable, it is at one distance in a step and at
    another in a tensor."""
    leading = {group[0] for group in term.dims if group and not any(varies(extent(term.ranges[v])) for v in group)}
    visible = term.visible
    steps = [dict(f.at[0].terms) for f in term.factors if f.atom is STEP]
    indices = [dict(i.terms) for f in term.factors if f.atom.id >= FIRST_ID for i in f.at if len(i.terms) > 1]
    for variable in sorted({v for step in steps for v in step if v not in visible or v in leading}):
        size = extent(term.ranges[variable])
        pairs = ((step, index) for step in steps if variable in step for index in indices if variable in index)
        if type(size) is int and any(_turns(*pair, variable) for pair in pairs) and not table.over("mask_parts", size):
            return variable
    return None


def _turns(step: dict[Variable, int], index: dict[Variable, int], variable: Variable) -> bool:
    """Whether a variable and an inner one are at other distances in a step than in a tensor."""
    inner = [w for w in step if w in index and abs(index[w]) < abs(index[variable])]
    return any(step[variable] * index[w] != step[w] * index[variable] for w in inner)


def _pieces(term: Term, variable: Variable) -> Iterator[Term]:
    """The term at each element of a variable that is summed, or that leads a dim."""
    low, size = term.ranges[variable][0], int(extent(term.ranges[variable]))
    dim = next((n for n, group in enumerate(term.dims) if variable in group), None)
    for number in range(size):
        if dim is None:
            rest = {v: span for v, span in term.ranges.items() if v != variable}
            yield term.with_(factors=substitute(term.factors, {variable: Index((), low + number)}), ranges=rest)
        else:
            row = 1
            for inner in term.dims[dim][1:]:
                row *= int(extent(term.ranges[inner]))
            yield cut_term(term, dim, number * row, (number + 1) * row)
