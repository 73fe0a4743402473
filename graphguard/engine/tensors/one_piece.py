"""Tensors in pieces as one, each piece a product with steps, which are 0 outside of it; and back."""

from __future__ import annotations

from collections.abc import Sequence

from graphguard.engine.algebra.grid import covers
from graphguard.engine.algebra.merge import merged
from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import collapse
from graphguard.engine.terms.term import IMPULSE, STEP, WINDOW, Factor, Index, Term, Value


def edges_of(values: Sequence[Value], dim: int) -> list[int]:
    """Where the pieces of tensors begin and end along a dim; none if that differs between lanes."""
    sizes = {value.shape[dim] for value in values if isinstance(value.shape[dim], int)}
    bounds = [bound for value in values for term in value.terms for bound in term.box[dim]]
    if len(sizes) != 1 or any(not isinstance(bound, int) for bound in bounds):
        return []
    return sorted({0, *sizes, *(int(bound) for bound in bounds)})  # type: ignore[arg-type]


def in_one_piece(table: Table, value: Value) -> Value:
    """The tensor with terms that cover all of it, where they can."""
    if all(covers(term.box, value.shape) for term in value.terms):
        return value
    terms = [table.settle(_spread(table, term, value)) for term in value.terms]
    return Value(value.shape, merged(table, [term for term in terms if term is not None]))


def _spread(table: Table, term: Term, value: Value) -> Term:
    factors, ranges, box, dims = list(term.factors), dict(term.ranges), list(term.box), list(term.dims)
    for dim, (size, (begin, end)) in enumerate(zip(value.shape, term.box, strict=True)):
        if not all(isinstance(each, int) for each in (size, begin, end)) or (begin == 0 and end == size):
            continue
        if len(dims[dim]) > 1:
            continue
        if not dims[dim]:
            variable = next(table.names)
            factors.append(Factor(IMPULSE, (Index(((variable, 1),), collapse(-begin)),)))
            ranges[variable], dims[dim] = (0, size), (variable,)
        else:
            (variable,) = dims[dim]
            low, high = ranges[variable]
            if begin != 0:
                factors.append(Factor(STEP, (Index(((variable, 1),), collapse(1 - low)),)))
            if end != size:
                factors.append(Factor(STEP, (Index(((variable, -1),), high),)))
            ranges[variable] = collapse(low - begin), collapse(low - begin + size)
        box[dim] = (0, size)
    return term.with_(factors=tuple(factors), ranges=ranges, dims=tuple(dims), box=tuple(box))


def in_pieces_again(table: Table, value: Value) -> Value | None:
    """The tensor with boxes in place of steps along its dims; None if it has no such steps."""
    if not any(_marks_piece(term, factor) for term in value.terms for factor in term.factors):
        return None
    terms = []
    for term in value.terms:
        factors = tuple(f._replace(atom=WINDOW) if _marks_piece(term, f) else f for f in term.factors)
        settled = table.settle(term.with_(factors=factors))
        terms += [] if settled is None else [settled]
    return Value(value.shape, merged(table, terms))


def _marks_piece(term: Term, factor: Factor) -> bool:
    """Whether a factor is a step along one of the tensor's own dims."""
    if factor.atom is not STEP or len(factor.at[0].terms) != 1:
        return False
    ((variable, stride),) = factor.at[0].terms
    return abs(stride) == 1 and (variable,) in term.dims
