"""Numbers that index: what is known of them, and what must be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphguard.engine.algebra.grid import in_cells
from graphguard.engine.store.table import Table
from graphguard.engine.tensors.position_runs import masked_positions
from graphguard.engine.terms.lane import everywhere, varies
from graphguard.engine.terms.term import IMPULSE, Factor, Term, Undescribed, Value, extent
from graphguard.lemmas.registry import Call
from graphguard.lemmas.spans import span_of


def infer(c: Call, index: Value, size: int) -> None:
    """What indexes a dim of the sequential program lies in it: an assumption on elements of inputs, which the report lists."""
    if not c.table.recording:
        return
    for _, terms in in_cells(c.table, index):
        factor = the_factor(terms)
        if factor is not None and factor.atom.kind == "input":
            c.table.facts.infer(factor, terms[0].ranges, [(0, size)])


def the_factor(terms: Sequence[Term]) -> Factor | None:
    """The one tensor that terms on the same elements are."""
    if len(terms) != 1 or len(terms[0].factors) != 1 or terms[0].coefficient != 1 or terms[0].summed or varies(terms[0].weight):
        return None
    (factor,) = terms[0].factors
    return factor if factor.power == 1 else None


def bounded(c: Call, value: Value, low: int, high: int) -> Value:
    """The value, noting that what it was described as lies in [low, high)."""
    for term in value.terms:
        if len(value.terms) == 1 and len(term.factors) == 1 and term.coefficient == 1 and term.factors[0].power == 1:
            atom = term.factors[0].atom
            if atom.kind in ("op", "function"):
                c.table.facts.declare(atom, low, high)
    return value


def hot(c: Call, index: Value, size: int, dim: int, *, wraps: bool = False) -> Value:
    """[index = v] for v in [0, size) along a new dim. Outside torch raises, or counts from the end: neither is a row of zeros.

    The sequential program is defined where it does not raise; of the ranks it has to be known that they do not."""
    known = masked_positions(c, index, size)
    if known is not None:
        return known.hot(c.table, index.shape, size, dim)
    parts = _dims_in_parts(index)
    if parts is not None:
        split = c.reshape(index, [size_of for group in parts for size_of in group])
        found = hot(c, split, size, sum(map(len, parts[:dim])), wraps=wraps)
        return c.reshape(found, [*index.shape[:dim], size, *index.shape[dim:]])
    span = span_of(c.table, index)
    if wraps or not c.table.recording:
        if wraps and c.table.recording and _is_open(c.table, index):
            infer(c, index, size)
            span = span_of(c.table, index)
        if wraps and span is not None and everywhere(span[1] < 0) and everywhere(span[0] >= -size):
            return c.one_hot(c.add(index, c.full((), size)), size, dim)
        if span is None or not (everywhere(span[0] >= 0) and (c.table.recording or everywhere(span[1] < size))):
            raise Undescribed("an index that may lie outside of the tensor that it indexes")
    infer(c, index, size)
    return c.one_hot(index, size, dim)


def _dims_in_parts(index: Value) -> list[list[int]] | None:
    """The sizes that a reshape has joined to dims, where an index was put together from pieces before: side by side in a dim
    that is joined with others they are no boxes any more, but they are if the dims are parted again."""
    if len(index.terms) < 2 or not any(f.atom is IMPULSE for term in index.terms for f in term.factors):
        return None
    found = [[[extent(term.ranges[v]) for v in group] or [1] for group in term.dims] for term in index.terms]
    sizes = [size for group in found[0] for size in group]
    if any(isinstance(size, np.ndarray) for size in sizes) or any(each != found[0] for each in found):
        return None
    return [[int(size) for size in group] for group in found[0]] if len(sizes) > len(index.shape) else None


def _is_open(table: Table, index: Value) -> bool:
    """Whether nothing has been said of the range of an input."""
    if len(index.terms) != 1:
        return False
    return all(table.facts.numbers(factor, index.terms[0].ranges) is None for factor in index.terms[0].factors)
