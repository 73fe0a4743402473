"""Changes of shape: reshape regroups and splits variables, expand adds variables that nothing mentions."""

from __future__ import annotations

from collections.abc import Sequence

from graphguard.engine.algebra.merge import merged
from graphguard.engine.algebra.product import Layout
from graphguard.engine.algebra.value import concat, cut, joined_inside
from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import Lane, collapse, equal, everywhere
from graphguard.engine.terms.term import IMPULSE, WINDOW, Factor, Index, Range, Term, Undescribed, Value, Variable, extent

Block = tuple[list[int], list[int]]  # old dims and new dims that hold the same elements


def reshape(table: Table, value: Value, shape: Sequence[int]) -> Value:
    """The same elements in row-major order."""
    if len(shape) == len(value.shape) and all(equal(a, b) for a, b in zip(value.shape, shape, strict=True)):
        return value
    if any(equal(size, 0) for size in shape):  # nothing is left to say of no elements
        return Value(tuple(shape), ())
    blocks = _blocks(value.shape, shape)
    terms = []
    try:
        for term in value.terms:
            settled = table.settle(_reshaped(table, term, blocks, value.shape, shape))
            if settled is not None:
                terms.append(settled)
    except Undescribed:
        dim = _dim_of_rows(table, value.shape, shape)
        if dim is None:
            raise
        return _row_by_row(table, value, shape, dim)
    return joined_inside(table, Value(tuple(shape), merged(table, terms)))


def _dim_of_rows(table: Table, old: Sequence[Lane], new: Sequence[int]) -> int | None:
    """The first dim that changes, if it becomes rows, or is of rows that are put one behind the other."""
    dim = next((d for d, (a, b) in enumerate(zip(old, new, strict=False)) if not equal(a, b)), None)
    if dim is None or not isinstance(old[dim], int) or not new[dim]:
        return None
    fewer, more = sorted((int(old[dim]), new[dim]))
    return dim if fewer > 1 and more % fewer == 0 and not table.over("rows", fewer) else None


def _row_by_row(table: Table, value: Value, shape: Sequence[int], dim: int) -> Value:
    """A dim in pieces that becomes rows, or rows in pieces that become a dim: the pieces may begin and end within rows, so that
    each row is taken by itself."""
    size = int(value.shape[dim])
    rows = min(size, shape[dim])
    width, wide = size // rows, shape[dim] // rows
    parts = [cut(table, value, dim, n * width, (n + 1) * width) for n in range(rows)]
    return concat(table, [reshape(table, part, [*shape[:dim], wide, *shape[dim + 1 :]]) for part in parts], dim)


def expand(table: Table, value: Value, shape: Sequence[Lane]) -> Value:
    """Dims of size 1 repeated; new dims in front."""
    front = len(shape) - len(value.shape)
    wide = [d for d, new in enumerate(shape) if d < front or not equal(value.shape[d - front], new)]
    if any(d >= front and not equal(value.shape[d - front], 1) for d in wide):
        raise Undescribed("only dims of size 1 are repeated")
    terms = []
    for term in value.terms:
        dims: list[tuple[Variable, ...]] = [()] * front + list(term.dims)
        box: list[Range] = [(0, 1)] * front + list(term.box)
        ranges = dict(term.ranges)
        for dim in wide:
            if not equal(shape[dim], 1):
                variable = next(table.names)
                dims[dim], ranges[variable], box[dim] = (variable,), (0, shape[dim]), (0, shape[dim])
        terms.append(term.with_(ranges=ranges, dims=tuple(dims), box=tuple(box)))
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


def _reshaped(table: Table, term: Term, blocks: list[Block], old_shape: Sequence[Lane], shape: Sequence[int]) -> Term:
    layout = Layout(table)
    labels = "".join(chr(97 + dim) for dim in range(len(term.box)))
    layout.lay(term, labels)
    dims: dict[int, tuple[Variable, ...]] = {}
    box: dict[int, Range] = {}
    for old, new in blocks:
        groups = [layout.groups[labels[dim]] for dim in old]
        if len(old) == len(new) == 1:
            dims[new[0]], box[new[0]] = tuple(groups[0]), term.box[old[0]]
            continue
        spans = [term.box[dim] for dim in old]
        sizes = [int(old_shape[dim]) for dim in old]
        covered = _covered(table, layout, groups, spans, sizes)
        variables = [v for group in groups for v in group if not equal(extent(layout.ranges[v]), 1)]
        for dim, (size, span) in zip(new, _spread(covered, [shape[d] for d in new]), strict=True):
            dims[dim], box[dim] = tuple(_leading(layout, variables, size)), span
        if variables:
            raise Undescribed("a reshape that leaves elements over")
    grouped = tuple(dims[dim] for dim in range(len(shape)))
    boxes = tuple(box[dim] for dim in range(len(shape)))
    return Term(term.coefficient, tuple(layout.factors()), layout.ranges, grouped, boxes, term.weight)


def _covered(table: Table, layout: Layout, groups: list[list[Variable]], spans: list[Range], sizes: list[int]) -> Range | None:
    """The run of elements of a block that the term covers; None if all. Single elements inside become impulses."""
    partial = [d for d, span in enumerate(spans) if not (equal(span[0], 0) and equal(span[1], sizes[d]))]
    outer = 1
    for dim, size in enumerate(sizes):
        if dim in partial:
            if outer == 1 and partial == [dim]:
                inner = _count(sizes[dim + 1 :], list(range(len(sizes) - dim - 1)))
                return collapse(spans[dim][0] * inner), collapse(spans[dim][1] * inner)
            groups[dim] = _windowed(table, layout, groups[dim], spans[dim], size)
            partial.remove(dim)
        outer *= size
    return None


def _windowed(table: Table, layout: Layout, group: list[Variable], span: Range, size: int) -> list[Variable]:
    """A dim of which the term has a part, as a whole one: indicators say where it counts. What is read elsewhere is void."""
    low, high = span
    variable = next(table.names)
    if not group:
        layout.ranges[variable] = (0, size)
        layout.parts.append((Factor(IMPULSE, (Index(((variable, 1),), collapse(-low)),)),))
        return [variable]
    inner = _count([extent(layout.ranges[v]) for v in group[1:]], list(range(len(group) - 1)))
    if size % inner or not (everywhere(low % inner == 0) and everywhere(high % inner == 0)):
        raise Undescribed("a reshape of a piece that lies across joined dims")
    low, high, size = collapse(low // inner), collapse(high // inner), size // inner
    first, _ = layout.ranges.pop(group[0])
    layout.replace(group[0], Index(((variable, 1),), collapse(first - low)))
    layout.ranges[variable] = (0, size)
    layout.parts.append((
        Factor(WINDOW, (Index(((variable, 1),), collapse(1 - low)),)),
        Factor(WINDOW, (Index(((variable, -1),), high),)),
    ))  # fmt: skip
    return [variable, *group[1:]]


def _spread(covered: Range | None, shape: list[int]) -> list[tuple[int, Range]]:
    """For each new dim the elements that the term has there, and where."""
    if covered is None:
        return [(size, (0, size)) for size in shape]
    result: list[tuple[int, Range]] = []
    for place, size in enumerate(shape):
        inner = _count(shape, list(range(place + 1, len(shape))))
        low, high = covered
        if size == 1:
            result.append((1, (0, 1)))
            continue
        if not (everywhere(low % inner == 0) and everywhere(high % inner == 0)):
            raise Undescribed("a reshape that cuts a piece")
        span = (collapse(low // inner), collapse(high // inner))
        count = extent(span)
        if not isinstance(count, int):
            raise Undescribed("a reshape of pieces whose sizes differ between lanes")
        return [*result, (count, span), *((rest, (0, rest)) for rest in shape[place + 1 :])]
    return result


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
