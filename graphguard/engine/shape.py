"""Changes of shape: reshape regroups and splits variables, expand adds variables that nothing mentions."""

from __future__ import annotations

from collections.abc import Sequence

from graphguard.engine.lane import Lane, equal
from graphguard.engine.monomial import Monomial, Range, Undescribed, Variable, extent
from graphguard.engine.placed import Placed
from graphguard.engine.product import Layout
from graphguard.engine.table import Table
from graphguard.engine.value import Value, without_single_dims

Block = tuple[list[int], list[int]]  # old dims and new dims that hold the same elements


def reshape(table: Table, value: Value, shape: Sequence[int]) -> Value:
    """The same elements in row-major order. Dims that stay as they are may be covered in part, or differ between lanes."""
    blocks = _blocks(value.shape, shape)
    return Value(tuple(shape), tuple(_reshaped(table, term, blocks, value.shape, shape) for term in value.terms))


def expand(table: Table, value: Value, shape: Sequence[Lane]) -> Value:
    """Dims of size 1 repeated."""
    wide = [dim for dim, (old, new) in enumerate(zip(value.shape, shape, strict=True)) if not equal(old, new)]
    if any(not equal(value.shape[dim], 1) for dim in wide):
        raise Undescribed("only dims of size 1 are repeated")
    terms = []
    for term in value.terms:
        dims, ranges, box = list(term.monomial.dims), dict(term.monomial.ranges), list(term.box)
        for dim in wide:
            variable = next(table.names)
            dims[dim], ranges[variable], box[dim] = (variable,), (0, shape[dim]), (0, shape[dim])
        terms.append(Placed(Monomial(term.monomial.coefficient, term.monomial.factors, ranges, tuple(dims)), tuple(box)))
    return Value(tuple(shape), tuple(terms))


def _blocks(old: Sequence[Lane], new: Sequence[int]) -> list[Block]:
    """The finest division of both shapes into runs of dims with equally many elements."""
    blocks: list[Block] = []
    i = j = 0
    while i < len(old) or j < len(new):
        if i < len(old) and j < len(new) and equal(old[i], new[j]):
            blocks.append(([i], [j]))
            i, j = i + 1, j + 1
            continue
        mine, its = ([i], [j]) if i < len(old) and j < len(new) else (list(range(i, len(old))), list(range(j, len(new))))
        i, j = i + len(mine), j + len(its)
        while (a := _count(old, mine)) != (b := _count(new, its)):
            if a < b and i < len(old):
                mine.append(i)
                i += 1
            elif b < a and j < len(new):
                its.append(j)
                j += 1
            else:
                raise Undescribed(f"a reshape from {tuple(old)} to {tuple(new)}")
        blocks.append((mine, its))
    return blocks


def _count(shape: Sequence[Lane], dims: list[int]) -> int:
    count = 1
    for dim in dims:
        size = shape[dim]
        if not isinstance(size, int):
            raise Undescribed("a reshape of dims whose sizes differ between lanes")
        count *= size
    return count


def _reshaped(table: Table, term: Placed, blocks: list[Block], old_shape: Sequence[Lane], shape: Sequence[int]) -> Placed:
    layout = Layout(table)
    labels = "".join(chr(97 + dim) for dim in range(len(term.box)))
    layout.lay(term.monomial, labels)
    dims: dict[int, tuple[Variable, ...]] = {}
    box: dict[int, Range] = {}
    for old, new in blocks:
        if len(old) == len(new) == 1:
            dims[new[0]], box[new[0]] = tuple(layout.groups[labels[old[0]]]), term.box[old[0]]
            continue
        for dim in old:
            if not (equal(term.box[dim][0], 0) and equal(term.box[dim][1], old_shape[dim])):
                raise Undescribed("a reshape of a piece that covers a part of the dim")
        variables = [v for dim in old for v in layout.groups[labels[dim]] if not equal(extent(layout.ranges[v]), 1)]
        for dim in new:
            dims[dim], box[dim] = tuple(_leading(layout, variables, shape[dim])), (0, shape[dim])
        if variables:
            raise Undescribed("a reshape that leaves elements over")
    grouped = tuple(dims[dim] for dim in range(len(shape)))
    monomial = Monomial(term.monomial.coefficient, tuple(layout.factors()), layout.ranges, grouped)
    return Placed(without_single_dims(monomial), tuple(box[dim] for dim in range(len(shape))))


def _leading(layout: Layout, variables: list[Variable], size: int) -> list[Variable]:
    """Take variables from the front that hold `size` elements together, splitting the last where it holds more."""
    group: list[Variable] = []
    while size > 1:
        if not variables:
            raise Undescribed("a reshape that needs more elements than there are")
        held = _count([extent(layout.ranges[variables[0]])], [0])
        if held > size:
            variables[:1] = layout.split(variables[0], size)
            held = size
        if size % held:
            raise Undescribed("a reshape that cuts across joined dims")
        group.append(variables.pop(0))
        size //= held
    return group
