"""Terms that are parts of one: equal ones add up, neighbouring ranges and boxes join, and lanes that hold alike share a term.

Two terms are compared with all of their variables starting at 0, so that they differ in the distances of their positions alone.
They join if they agree in all but one place, and there one continues the other in every lane: a sum beside a sum, a piece of
the tensor beside the next piece, or two that lie at some distance and become a sum over, or a dim of, two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Any

import numpy as np

from graphguard.engine.algebra.alike import Names, matches, same_span, signature, unstepped
from graphguard.engine.algebra.counts import with_number
from graphguard.engine.algebra.infinities import has_garbage, has_infinities
from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import Lane, collapse, equal, everywhere, varies
from graphguard.engine.terms.summand_order import lanes_in, numbers_of, sorted_by_lane, start_of, with_numbers
from graphguard.engine.terms.term import (
    STEP,
    Factor,
    Index,
    Range,
    Term,
    Undescribed,
    Variable,
    bounds,
    extent,
    stride_order,
    substitute,
)

Flags = np.bool_ | np.ndarray[Any, np.dtype[np.bool_]]


def merged(table: Table, terms: Sequence[Term]) -> tuple[Term, ...]:
    """The terms with all that can be joined joined, in the order of their first parts."""
    if len(terms) < 2:
        return tuple(terms)
    groups = _by_box(terms)
    if 1 < len(groups) < len(terms):  # what is summed in one place first: pieces that are joined hide what each is part of
        terms = [term for group in groups for term in _inserted(table, group)]
    parts = len(groups)
    result = _inserted(table, terms, parts)
    if len(result) > 1:
        ordered = ordered_by_lane(table, result)
        if ordered is not None:
            result = _inserted(table, ordered, parts)
    if len(result) > 1:
        parted = _parted(table, result)
        if parted is not None:
            parted = ordered_by_lane(table, parted) or parted
            regrouped = _inserted(table, _inserted(table, parted, parts, pairs=False), parts)
            result = regrouped if len(regrouped) <= len(result) else result
    return tuple(result)


def _by_box(terms: Sequence[Term]) -> list[list[Term]]:
    """The terms that cover the same part of the tensor together, in the order of the first ones."""
    groups: list[list[Term]] = []
    for term in terms:
        for group in groups:
            if all(same_span(x, y) for x, y in zip(group[0].box, term.box, strict=True)):
                group.append(term)
                break
        else:
            groups.append([term])
    return groups


def _parted(table: Table, terms: Sequence[Term]) -> list[Term] | None:
    """The terms with sums over a few taken apart where another term is like one of the few, all in ascending order: parts
    that were joined at a distance, before the part between them came, are joined anew."""
    found: list[Term] = []
    for term in terms:
        like_one = any(len(o.ranges) + 1 == len(term.ranges) and unstepped(o) == unstepped(term) for o in terms)
        few = next((v for v in term.summed if _is_few(table, term, v)), None) if like_one else None
        found += _instances(table, term, few) if few is not None else [term]
    if len(found) == len(terms):
        return None
    return sorted(found, key=lambda term: start_of(grounded(term)))


def scattered(table: Table, terms: Sequence[Term]) -> list[Term] | None:
    """The terms with sums whose elements lie apart taken apart, and only neighbours joined: the same terms, whichever of the
    elements were joined before. None if no sum is such a one, or if they are too many."""
    found, pending = list[Term](), list(terms)
    while pending:
        term = pending.pop()
        apart = next((v for v in term.summed if isinstance(extent(term.ranges[v]), int) and _skips(term, v)), None)
        if apart is None:
            found.append(term)
        elif table.over("scattered", len(found) + len(pending) + int(extent(term.ranges[apart]))):
            return None
        else:
            pending += _instances(table, term, apart)
    if len(found) == len(terms):
        return None
    return _inserted(table, sorted(found, key=lambda term: start_of(grounded(term))), len(found), pairs=False)


def _skips(term: Term, variable: Variable) -> bool:
    """Whether a sum goes along some axis by more than one element at a time, or along several axes of one factor."""
    strides = [[s for index in factor.at for v, s in index.terms if v == variable] for factor in term.factors]
    return any(each and each != [1] for each in strides) or _passes_itself(term, variable)


def _passes_itself(term: Term, variable: Variable) -> bool:
    """Whether a sum moves one of two factors of one atom along an axis in which the other stays. Which of them comes first
    depends on the element, and where they meet they are a power."""
    here = [f for f in term.factors if variable in f.variables()]
    fixed = [f for f in term.factors if variable not in f.variables()]
    for moving, other in itertools.product(here, fixed):
        if moving.atom is other.atom:
            axes = [(i, j) for i, j in zip(moving.at, other.at, strict=True) if i.key != j.key]
            if len(axes) == 1 and axes[0][0].terms == ((variable, 1),) and not axes[0][1].terms:
                return True
    return False


def _leaves_gaps(term: Term, variable: Variable) -> bool:
    """Whether the elements of a sum lie further apart than what is summed at each of them."""
    summed = set(term.summed) - {variable}
    for factor in term.factors:
        for index in factor.at:
            stride = abs(dict(index.terms).get(variable, 0))
            inner = [abs(s) * (extent(term.ranges[v]) - 1) for v, s in index.terms if v in summed]
            if stride and everywhere(stride > 1 + sum(inner)):
                return True
    return False


def _is_few(table: Table, term: Term, variable: Variable) -> bool:
    size = extent(term.ranges[variable])
    return isinstance(size, int) and _leaves_gaps(term, variable) and not table.over("sum_parts", size)


def _instances(table: Table, term: Term, variable: Variable) -> list[Term]:
    low, high = term.ranges[variable]
    rest = {v: span for v, span in term.ranges.items() if v != variable}
    each = [Index((), collapse(low + n)) for n in range(int(extent((low, high))))]
    parts = [table.settle(term.with_(factors=substitute(term.factors, {variable: at}), ranges=rest)) for at in each]
    return [part for part in parts if part is not None]


def _inserted(table: Table, terms: Sequence[Term], parts: int = 1, pairs: bool = True) -> list[Term]:
    """All that can be joined, of a tensor in so many parts."""
    result: list[Term] = []
    most = min(table.limits.terms * parts, table.limits.terms_in_all)
    for term in terms:
        _insert(table, result, term, pairs)
        if len(result) > most:
            table.over("terms", -(-len(result) // parts))
            table.over("terms_in_all", len(result))
            raise Undescribed(f"a sum of more than {most} terms")
    return result


def _insert(table: Table, result: list[Term], term: Term, pairs: bool) -> None:
    """Add a term, joined with those that it continues; with `pairs`, also with one that lies at a distance."""
    mine = signature(term)
    for place, other in enumerate(result):
        joined = _joined(table, other, term, pairs) if signature(other) == mine else None
        if joined is None:
            stepped = _both_stepped(other, term)
            joined = None if stepped is None else _joined(table, *stepped, False)
        if joined is None and table.limits.step_cases:
            joined = with_number(table, other, term) or with_number(table, term, other)
        if joined is not None:
            del result[place]
            settled = table.settle(joined) if joined.coefficient else None
            if settled is not None:
                _insert(table, result, settled, pairs)
            return
    result.append(term)


def _both_stepped(a: Term, b: Term) -> tuple[Term, Term] | None:
    """Two terms that differ in steps alone, each with those of both, where a step that one has and the other has not is 1 on
    all of the other: blocks that a mask leaves whole, or of which it cuts one end and not the other."""
    if not any(f.atom is STEP for f in (*a.factors, *b.factors)):
        return None
    steps, bare = _apart(a)
    others, bare_b = _apart(b)
    if signature(bare) != signature(bare_b):
        return None
    for names, matched in matches(bare, bare_b):
        back = {w: v for v, w in names.items()}
        mine, theirs = _with_steps(a, steps, others, back), _with_steps(b, others, steps, names)
        if mine is not None and theirs is not None and len(mine) + len(theirs) > len(steps) + len(others):
            order = [step.at[0].key for step in substitute(mine, {v: Index(((w, 1),)) for v, w in names.items()})]
            theirs.sort(key=lambda step, order=order: order.index(step.at[0].key))  # type: ignore[misc]
            return a.with_(factors=(*mine, *bare.factors)), b.with_(factors=(*theirs, *matched.factors))
    return None


def _apart(term: Term) -> tuple[list[Factor], Term]:
    """The steps of a term, and the term without them."""
    steps = [factor for factor in term.factors if factor.atom is STEP]
    return steps, term.with_(factors=tuple(factor for factor in term.factors if factor.atom is not STEP))


def _with_steps(term: Term, own: Sequence[Factor], others: Sequence[Factor], names: Names) -> list[Factor] | None:
    """A term's steps and those of another one, in the order of positions; None if one of the others is not 1 there."""
    if any(v not in names for step in others for v in step.variables()):
        return None
    known = {step.at[0].key: step for step in own}
    for step in substitute(others, {v: Index(((w, 1),)) for v, w in names.items()}):
        if step.at[0].key not in known and not everywhere(bounds(step.at[0], term.ranges)[0] > 0):
            return None
        known.setdefault(step.at[0].key, step)
    return list(known.values())


def ordered_by_lane(table: Table, terms: Sequence[Term]) -> list[Term] | None:
    """The terms with those that differ in numbers alone in the same order in every lane; None if all are. Parts of sums in
    one place may also differ in how long they are, and in which lanes have them."""
    lanes = lanes_in(terms)
    if lanes is None:
        return None
    changed = False
    for alike in (_renamed_like, _renamed_part):
        result: list[Term] = []
        for group, originals in _alike_but_for_numbers(terms, alike):
            ordered = sorted_by_lane([numbers_of(term, lanes) for term in group]) if len(group) > 1 else None
            if ordered is None:
                result += originals
                continue
            changed = True
            settled = [table.settle(with_numbers(group[0], numbers)) for numbers in ordered]
            result += [term for term in settled if term is not None]
        terms = result
    return result if changed else None


def _alike_but_for_numbers(
    terms: Sequence[Term], alike: Callable[[Term, Term], Term | None]
) -> Iterator[tuple[list[Term], list[Term]]]:
    """Terms in groups, those of a group with the same variables, all starting at 0; and as they were."""
    groups: list[tuple[list[Term], list[Term]]] = []
    for original in terms:
        term = grounded(original)
        for group, originals in groups:
            other = alike(group[0], term)
            if other is not None:
                group.append(other)
                originals.append(original)
                break
        else:
            groups.append(([term], [original]))
    yield from groups


def _renamed_like(a: Term, b: Term) -> Term | None:
    """The second term with the variables of the first, if they differ in their boxes and offsets alone."""
    if a.coefficient != b.coefficient or signature(a) != signature(b) or varies(a.weight) or varies(b.weight):
        return None
    for names, other in matches(a, b, offsets=False):
        if all(same_span(a.ranges[v], other.ranges[w]) for v, w in names.items()):
            return _renamed(a, other, names)
    return None


def _renamed_part(a: Term, b: Term) -> Term | None:
    """The second term with the variables of the first, if they differ in where their sums begin and end, and in which lanes
    have them."""
    if a.coefficient != b.coefficient or signature(a) != signature(b) or not _is_share(a.weight, b.weight):
        return None
    if not all(same_span(x, y) for x, y in zip(a.box, b.box, strict=True)):
        return None
    for names, other in matches(a, b, offsets=False):
        if all(v not in a.visible or same_span(a.ranges[v], other.ranges[w]) for v, w in names.items()):
            return _renamed(a, other, names)
    return None


def _renamed(a: Term, b: Term, names: Names) -> Term:
    back = {w: Index(((v, 1),)) for v, w in names.items()}
    ranges = {v: b.ranges[names[v]] for v in a.ranges}
    return a.with_(factors=substitute(b.factors, back), box=b.box, ranges=ranges, weight=b.weight)


def _is_share(a: Lane, b: Lane) -> bool:
    """Whether two weights are one number where they are not 0."""
    weights = np.unique(np.concatenate([np.atleast_1d(a), np.atleast_1d(b)]))
    return len(weights[weights != 0]) == 1 and bool(weights.max() > 0)


# ---------------------------------------------------------------------- joining
def _joined(table: Table, a: Term, b: Term, pairs: bool) -> Term | None:
    if a.coefficient != b.coefficient and (has_infinities(table, a) or has_garbage(table, a)):
        return None  # infinity minus infinity
    if (varies(a.weight) or varies(b.weight)) and everywhere((np.asarray(a.weight) * b.weight) == 0):
        if not all(same_span(x, y) for x, y in zip(a.box, b.box, strict=True)):
            return None
        return next((_laned(a, each, names) for names, each in matches(a, b, offsets=False)), None)
    boxes = [d for d, (x, y) in enumerate(zip(a.box, b.box, strict=True)) if not same_span(x, y)]
    if len(boxes) > 1 or (boxes and a.coefficient != b.coefficient):
        return None
    dim = boxes[0] if boxes else None
    if dim is not None and not equal(a.box[dim][1], b.box[dim][0]):
        a, b = b, a
        if not equal(a.box[dim][1], b.box[dim][0]):
            return None
    a, b = grounded(a), grounded(b)
    for x, y in _alike(table, a, b, dim):
        for names, other in matches(x, y, offsets=False):
            joined = _join(table, x, other, names, dim, pairs)
            if joined is not None:
                return joined
    return None


def grounded(term: Term) -> Term:
    """The term with every variable starting at 0."""
    starts = {v: Index(((v, 1),), low) for v, (low, _) in term.ranges.items() if type(low) is not int or low != 0}
    if not starts:
        return term
    ranges = {v: (0, extent(span)) for v, span in term.ranges.items()}
    return term.with_(factors=substitute(term.factors, starts), ranges=ranges)


def _alike(table: Table, a: Term, b: Term, dim: int | None) -> Iterator[tuple[Term, Term]]:
    """The terms; or, if one has a variable more, which is summed or leads the dim, with the other as one element of it."""
    if len(a.ranges) == len(b.ranges):
        yield a, b
    elif len(a.ranges) == len(b.ranges) + 1:
        yield from ((a, each) for each in _as_one_of(table, a, b, dim))
    elif len(b.ranges) == len(a.ranges) + 1:
        yield from ((each, b) for each in _as_one_of(table, b, a, dim))


def _as_one_of(table: Table, more: Term, less: Term, dim: int | None) -> Iterator[Term]:
    candidates = more.summed if dim is None else list(more.dims[dim][:1])
    for variable in candidates:
        strides = [[dict(index.terms).get(variable, 0) for index in factor.at] for factor in more.factors]
        yield _with_variable(table, less, strides, 1, dim)


def _with_variable(table: Table, term: Term, strides: list[list[int]], count: int, dim: int | None) -> Term:
    """The term with one more variable of these strides: summed, or leading a dim."""
    variable = next(table.names)
    factors = []
    for factor, steps in zip(term.factors, strides, strict=True):
        at = []
        for index, step in zip(factor.at, steps, strict=True):
            terms = tuple(sorted([*index.terms, (variable, step)], key=stride_order)) if step else index.terms
            at.append(Index(terms, index.offset))
        factors.append(factor._replace(at=tuple(at)))
    dims = term.dims if dim is None else (*term.dims[:dim], (variable, *term.dims[dim]), *term.dims[dim + 1 :])
    return term.with_(factors=tuple(factors), ranges={**term.ranges, variable: (0, count)}, dims=dims)


def _laned(a: Term, b: Term, names: Names) -> Term:
    """One term for lanes that hold the one and lanes that hold the other."""
    mine = np.asarray(a.weight) != 0
    mine = np.broadcast_to(mine, np.broadcast_shapes(mine.shape, np.shape(b.weight)))

    def choose(x: Lane, y: Lane) -> Lane:
        return x if equal(x, y) else collapse(np.where(mine, x, y))

    def span(x: Range, y: Range) -> Range:
        return choose(x[0], y[0]), choose(x[1], y[1])

    factors = tuple(
        f._replace(at=tuple(Index(i.terms, choose(i.offset, j.offset)) for i, j in zip(f.at, g.at, strict=True)))
        for f, g in zip(a.factors, b.factors, strict=True)
    )
    coefficient, weight = _total(a, b)
    ranges = {v: span(a.ranges[v], b.ranges[w]) for v, w in names.items()}
    return Term(coefficient, factors, ranges, a.dims, tuple(map(span, a.box, b.box)), weight)


def _total(a: Term, b: Term) -> tuple[Fraction, Lane]:
    """The sum of the two coefficients, lane by lane."""
    if not isinstance(a.weight, np.ndarray) and not isinstance(b.weight, np.ndarray):
        return a.coefficient * a.weight + b.coefficient * b.weight, 1
    common = Fraction(
        gcd(a.coefficient.numerator, b.coefficient.numerator), lcm(a.coefficient.denominator, b.coefficient.denominator)
    )
    weight = int(a.coefficient / common) * a.weight + int(b.coefficient / common) * b.weight
    return (Fraction(0), 1) if equal(weight, 0) else (common, collapse(weight))


def _join(table: Table, a: Term, b: Term, names: Names, dim: int | None, pairs: bool) -> Term | None:
    """One term for both, where `b` lies at some distance from `a`; along a dim it comes after it."""
    distances = _distances(a, b)
    sizes = [v for v, w in names.items() if not equal(a.ranges[v][1], b.ranges[w][1])]
    still = all(equal(each, 0) for row in distances for each in row)
    if dim is None and still and not sizes:
        coefficient, weight = _total(a, b)
        return a.with_(coefficient=coefficient, weight=weight)
    if len(sizes) > 1:
        return None
    if not equal(a.weight, b.weight):
        if dim is not None or a.coefficient != b.coefficient:
            return None
        turned = {w: v for v, w in names.items()}, [[-d for d in row] for row in distances]
        return _extended(a, b, names, distances, sizes) or _extended(b, a, *turned, [names[v] for v in sizes])
    if a.coefficient == b.coefficient:
        continued = _continued(a, b, names, distances, sizes, dim)
        return continued or (_paired(table, a, distances, dim, b) if pairs and not sizes else None)
    if a.coefficient == -b.coefficient and len(sizes) == 1 and dim is None:
        return _reduced(a, b, names, distances, sizes[0])
    return None


def _distances(a: Term, b: Term) -> list[list[Lane]]:
    return [
        [collapse(j.offset - i.offset) for i, j in zip(x.at, y.at, strict=True)]
        for x, y in zip(a.factors, b.factors, strict=True)
    ]


def _moves_by(term: Term, distances: list[list[Lane]], variable: Variable, count: Lane) -> bool:
    """Whether all positions move as they would if a variable went on by a number of elements."""
    return all(
        equal(distance, dict(index.terms).get(variable, 0) * count)
        for factor, row in zip(term.factors, distances, strict=True)
        for index, distance in zip(factor.at, row, strict=True)
    )


def _continued(
    a: Term, b: Term, names: Names, distances: list[list[Lane]], sizes: list[Variable], dim: int | None
) -> Term | None:
    """`b` goes on where a variable of `a` ends; for a sum, also where it begins, or where not all lanes of `a` have `b`."""
    if dim is None:
        return _extended(a, b, names, distances, sizes)
    for variable in a.dims[dim][:1]:
        if sizes and sizes != [variable]:
            continue
        mine, its = a.ranges[variable][1], b.ranges[names[variable]][1]
        if _moves_by(a, distances, variable, mine):
            return _grown(a, b, variable, (0, collapse(mine + its)), dim)
    return None


def _extended(a: Term, b: Term, names: Names, distances: list[list[Lane]], sizes: list[Variable]) -> Term | None:
    """The sum of `a` longer by that of `b`, lane by lane at its end or before its beginning, and by nothing in lanes that do
    not have `b`."""
    there = np.asarray(b.weight) != 0
    if not np.all(~there | np.asarray(a.weight == b.weight)):
        return None
    for variable in sizes or a.summed:
        if variable in a.visible:
            return None
        mine, its = a.ranges[variable][1], b.ranges[names[variable]][1]
        after = _where_moved_by(a, distances, variable, mine)
        before = True if np.all(after) else _where_moved_by(a, distances, variable, collapse(-its))
        if np.all(after | before | ~there):
            low, high = np.where(there & ~after, -its, 0), np.where(there & after, mine + its, mine)
            return a.with_(ranges={**a.ranges, variable: (collapse(low), collapse(high))})
    return None


def _where_moved_by(term: Term, distances: list[list[Lane]], variable: Variable, count: Lane) -> Flags:
    """The lanes in which all positions move as they would if a variable went on by a number of elements."""
    moved: Flags = np.True_
    for factor, row in zip(term.factors, distances, strict=True):
        for index, distance in zip(factor.at, row, strict=True):
            here = distance == dict(index.terms).get(variable, 0) * count
            if here is False:
                return np.False_
            moved = moved & here
    return moved


def _grown(a: Term, b: Term, variable: Variable, span: Range, dim: int) -> Term:
    box = (*a.box[:dim], (a.box[dim][0], b.box[dim][1]), *a.box[dim + 1 :])
    return a.with_(ranges={**a.ranges, variable: span}, box=box)


def _paired(table: Table, a: Term, distances: list[list[Lane]], dim: int | None, b: Term) -> Term | None:
    """Two terms at a distance, as a sum over two or a dim of two."""
    steps: list[list[int]] = []
    for row in distances:
        steps.append([])
        for distance in row:
            if not isinstance(distance, int):
                return None
            steps[-1].append(distance)
    if dim is None:
        if a.summed and not _regular(a, steps) and not _interleaved(a, steps):
            return None
        if next((step for row in steps for step in row if step), 0) < 0:  # from the other one, it is upwards
            return _with_variable(table, b, [[-step for step in row] for row in steps], 2, None)
        return _with_variable(table, a, steps, 2, None)
    if not equal(extent(a.box[dim]), extent(b.box[dim])):
        return None
    pair = _with_variable(table, a, steps, 2, dim)
    return pair.with_(box=(*a.box[:dim], (a.box[dim][0], b.box[dim][1]), *a.box[dim + 1 :]))


def _regular(a: Term, steps: list[list[int]]) -> bool:
    """Whether the pair is likely to be part of a longer row: a step at least as long as every sum that moves."""
    for factor, row in zip(a.factors, steps, strict=True):
        for index, step in zip(factor.at, row, strict=True):
            for variable, stride in index.terms:
                if step and variable not in a.visible and not everywhere(abs(step) >= abs(stride) * a.ranges[variable][1]):
                    return False
    return True


def _interleaved(a: Term, steps: list[list[int]]) -> bool:
    """Whether the other term has what lies halfway between the elements of a sum of this one: both are one sum then."""
    for variable in a.summed:
        strides = [[dict(index.terms).get(variable, 0) for index in factor.at] for factor in a.factors]
        if any(map(any, strides)) and any(strides == [[sign * 2 * d for d in row] for row in steps] for sign in (1, -1)):
            return True
    return False


def _reduced(a: Term, b: Term, names: Names, distances: list[list[Lane]], variable: Variable) -> Term | None:
    """`b` takes an end of a sum of `a` away, or the reverse."""
    if variable in a.visible:
        return None
    mine, its = a.ranges[variable][1], b.ranges[names[variable]][1]
    if everywhere(its > mine):
        return _reduced(b, a, {w: v for v, w in names.items()}, [[-d for d in row] for row in distances], names[variable])
    if not everywhere(mine >= its):
        return None
    if _moves_by(a, distances, variable, 0):
        return a.with_(ranges={**a.ranges, variable: (its, mine)})
    if _moves_by(a, distances, variable, collapse(mine - its)):
        return a.with_(ranges={**a.ranges, variable: (0, collapse(mine - its))})
    return None
