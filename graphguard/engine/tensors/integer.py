"""Integers and masks: comparisons of positions and of whole-number tensors, their negation, and one-hot rows.

A comparison of positions is a step or an impulse. A comparison of a tensor of known range with a number is a sum of deltas over
the numbers that it may be: `ids < lo` is Σ_v [ids = v] for v below lo. So masks are ranges, and complements are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from graphguard.engine.algebra.function import apply
from graphguard.engine.algebra.grid import covers, in_cells, unmasked
from graphguard.engine.algebra.merge import merged
from graphguard.engine.algebra.product import Layout, constant, filled, multiply
from graphguard.engine.algebra.value import add, moved, scale
from graphguard.engine.store.table import Table
from graphguard.engine.tensors.choice import row_at, rows_of
from graphguard.engine.terms.definition import Part
from graphguard.engine.terms.lane import Lane, collapse, equal, larger, smaller, varies
from graphguard.engine.terms.term import (
    IDX,
    IMPULSE,
    ONE,
    STEP,
    Factor,
    Index,
    Term,
    Value,
    combined,
    extent,
    scaled,
)

LABELS = "abcdefghijklmnopqrstuvwxyz"


class Affine(NamedTuple):
    """A whole-number tensor: a multiple of one subject, plus a position. `layout` holds the variables of both."""

    layout: Layout
    sign: int
    subject: tuple[Factor, ...]
    position: Index


def in_pieces(value: Value) -> bool:
    return not all(covers(term.box, value.shape) for term in value.terms)


def _by_piece(
    table: Table, value: Value, work: Callable[[Value], Value | None], added: int | None = None
) -> tuple[Term, ...] | None:
    """Work on a tensor in pieces, such as labels that were shifted: each piece by itself. The result may have a dim more."""
    terms: list[Term] = []
    for cell, inside in in_cells(table, value):
        here = tuple((0, extent(span)) for span in cell)
        shape = tuple(extent(span) for span in cell)
        done = work(Value(shape, tuple(unmasked(term, cell).with_(box=here) for term in inside)))
        if done is None:
            return None
        starts = [low for low, _ in cell]
        if added is not None:
            starts.insert(added, 0)
        for term in done.terms:
            for dim, start in enumerate(starts):
                term = moved(term, dim, start)
            settled = table.settle(term)
            terms += [] if settled is None else [settled]
    return merged(table, terms)


def compare(table: Table, name: str, a: Value, b: Value, *, whole: bool) -> Value:
    """lt, le, gt, ge, eq or ne. `whole`: both tensors hold whole numbers."""
    if name in ("ne", "ge", "gt"):
        if name == "gt":
            return compare(table, "lt", b, a, whole=whole)
        return negate(table, compare(table, "eq" if name == "ne" else "lt", a, b, whole=whole))
    if whole:
        distance = add(table, [b, scale(a, -ONE)])
        if name == "le":
            distance = add(table, [distance, constant(distance.shape, ONE, table)])
        exact = _sign_test(table, "eq" if name == "eq" else "lt", distance)
        if exact is not None:
            return exact
    if name == "lt" and not a.terms:
        return apply(table, "positive", [b])
    if name == "lt" and not b.terms:
        return apply(table, "positive", [scale(a, -ONE)])
    return apply(table, name, [a, b])


def _sign_test(table: Table, name: str, distance: Value) -> Value | None:
    """[distance > 0] or [distance = 0] where that is exact; None where it is not known."""
    if in_pieces(distance):
        terms = _by_piece(table, distance, lambda piece: _sign_test(table, name, piece))
        return None if terms is None else Value(distance.shape, terms)
    affine = _affine(table, distance)
    if affine is None:
        return None
    layout, sign, subject, position = affine
    ranges = dict(layout.ranges)
    if sign == 0:
        factors: tuple[Factor, ...] = (Factor(STEP if name == "lt" else IMPULSE, (position,)),)
    else:
        atom, axes = delta_of(table, subject)
        if name == "eq":
            factors = (Factor(atom, (*axes, scaled(position, -sign))),)
        else:
            bounds = table.facts.subject_span(Factor(atom, (*axes, position)), ranges)
            if bounds is None or position.terms:
                return None
            limit = position.offset  # subject < limit, or subject > -limit
            low, high = (bounds[0], limit) if sign < 0 else (collapse(1 - limit), bounds[1])
            variable = next(table.names)
            low, high = larger(low, bounds[0]), smaller(high, bounds[1])
            ranges[variable] = (low, larger(low, high))
            factors = (Factor(atom, (*axes, Index(((variable, 1),)))),)
    return _assembled(table, distance, layout, factors, ranges)


def _assembled(table: Table, like: Value, layout: Layout, factors: tuple[Factor, ...], ranges: dict) -> Value:  # type: ignore[type-arg]
    dims = tuple(tuple(layout.groups.get(label, ())) for label in LABELS[: len(like.shape)])
    term = table.settle(Term(ONE, factors, ranges, dims, tuple((0, size) for size in like.shape)))
    return Value(like.shape, () if term is None else (term,))


def _affine(table: Table, value: Value) -> Affine | None:
    """The tensor as a subject and a position, if it is of that form and covered everywhere."""
    labels = LABELS[: len(value.shape)]
    layout = Layout(table)
    layout.lay(filled(table, [(0, size) for size in value.shape]), labels)
    sign, subject_part, number = 0, None, 0
    steps: list[tuple[int, int]] = []
    offset: Lane = 0
    for term in value.terms:
        if not covers(term.box, value.shape) or term.summed or term.coefficient.denominator != 1:
            return None
        number = int(term.coefficient)
        if not term.factors:
            offset = collapse(offset + number * term.weight)
            continue
        if varies(term.weight):
            return None
        layout.lay(term, labels)
        place = len(layout.parts) - 1
        if len(term.factors) == 1 and term.factors[0].atom is IDX and term.factors[0].power == 1:
            steps.append((place, number))
        elif subject_part is None and abs(number) == 1:
            sign, subject_part = number, place
        else:
            return None
    position = combined([Index((), offset), *(scaled(layout.parts[place][0].at[0], n) for place, n in steps)])
    return Affine(layout, sign, () if subject_part is None else layout.parts[subject_part], position)


def delta_of(table: Table, subject: tuple[Factor, ...]):  # type: ignore[no-untyped-def]
    """The atom [subject = v] and the positions of the subject; v is its last position."""
    atom, axes = table.define("delta", "eq", (), 1, [Part((0, ONE), subject)], {}, indicator=True)
    return atom, axes


def normalised(table: Table, value: Value) -> Value:
    """An affine tensor of positions as one term: 2 i + 3 is idx[2 i + 3]."""
    if not any(len(t.factors) == 1 and t.factors[0].atom is IDX for t in value.terms):
        return value
    affine = _affine(table, value)
    if affine is None or affine.sign:
        return value
    return _assembled(table, value, affine.layout, (Factor(IDX, (affine.position,)),), dict(affine.layout.ranges))


def negate(table: Table, mask: Value) -> Value:
    """1 where the mask is 0."""
    if mask.terms and in_pieces(mask):
        terms = _by_piece(table, mask, lambda piece: negate(table, piece))
        assert terms is not None
        return Value(mask.shape, terms)
    if len(mask.terms) == 1:
        (term,) = mask.terms
        if (
            covers(term.box, mask.shape)
            and len(term.factors) == 1
            and term.factors[0].atom is STEP
            and term.coefficient == 1
            and not varies(term.weight)
        ):
            position = combined([Index((), 1), scaled(term.factors[0].at[0], -1)])
            settled = table.settle(term.with_(factors=(Factor(STEP, (position,)),)))
            return Value(mask.shape, () if settled is None else (settled,))
    one_left = _between_steps(mask)
    if one_left is not None:
        settled = table.settle(one_left)
        return Value(mask.shape, () if settled is None else (settled,))
    ones = _all_values(table, mask) or constant(mask.shape, ONE, table)
    return add(table, [ones, scale(mask, -ONE)])


def _between_steps(mask: Value) -> Term | None:
    """Where a mask is all positions below one and all above it, the impulse at that one. Not in normal form."""
    places = [_step_along_dim(term, mask) for term in mask.terms] if len(mask.terms) == 2 else [None]
    found = [place for place in places if place is not None]
    if len(found) < 2 or found[0].dim != found[1].dim or found[0].sign != -found[1].sign:
        return None
    if not equal(found[0].first, -found[1].first):
        return None
    (step,) = mask.terms[0].factors
    return mask.terms[0].with_(factors=(Factor(IMPULSE, step.at),))


class _StepAlong(NamedTuple):
    """A step of a dim's positions, up or down, and what it reads at the first of them."""

    dim: int
    sign: int
    first: Lane


def _step_along_dim(term: Term, mask: Value) -> _StepAlong | None:
    if len(term.factors) != 1 or term.factors[0].atom is not STEP or term.coefficient != 1 or not equal(term.weight, 1):
        return None
    ((index,), terms) = term.factors[0].at, term.factors[0].at[0].terms
    if len(terms) != 1 or abs(terms[0][1]) != 1 or term.summed or not covers(term.box, mask.shape):
        return None
    (variable, sign), low = terms[0], term.ranges[terms[0][0]][0]
    dim = next(dim for dim, group in enumerate(term.dims) if variable in group)
    return _StepAlong(dim, sign, collapse(index.offset + sign * low)) if term.dims[dim] == (variable,) else None


def _all_values(table: Table, mask: Value) -> Value | None:
    """1 as a sum of deltas over all values, if the mask is a sum of deltas over some. Not in normal form."""
    for term in mask.terms:
        summed = term.summed
        if not covers(term.box, mask.shape):
            continue
        if len(summed) == 1 and len(term.factors) == 1 and term.factors[0].atom.kind == "delta" and not varies(term.weight):
            bounds = table.facts.subject_span(term.factors[0], term.ranges)
            if bounds is not None and term.factors[0].at[-1] == Index(((summed[0], 1),)):
                whole = term.with_(coefficient=ONE, ranges={**term.ranges, summed[0]: bounds})
                return Value(mask.shape, (whole,))
    return None


def where(table: Table, mask: Value, otherwise: Value, a: Value, b: Value) -> Value:
    """a where the mask is 1, b where it is 0, which is where the other mask is 1. All of one shape."""
    labels = LABELS[: len(mask.shape)]
    parts = []
    if a.terms:
        parts.append(multiply(table, [mask, a], [labels, labels], labels))
    if b.terms:
        parts.append(multiply(table, [otherwise, b], [labels, labels], labels))
    return add(table, parts) if parts else Value(mask.shape, ())


def one_hot(table: Table, value: Value, size: int, dim: int) -> Value:
    """[value = v] for v in [0, size), along a new dim."""
    shape = (*value.shape[:dim], size, *value.shape[dim:])
    if in_pieces(value):
        terms = _by_piece(table, value, lambda piece: one_hot(table, piece, size, dim), dim)
        assert terms is not None
        return Value(shape, terms)
    affine = _affine(table, value)
    if affine is None:
        return _one_hot_of_choice(table, value, size, dim)
    variable = next(table.names)
    distance = combined([Index(((variable, 1),)), scaled(affine.position, -1)])
    if affine.sign == 0:
        factors: tuple[Factor, ...] = (Factor(IMPULSE, (distance,)),)
    else:
        atom, axes = delta_of(table, affine.subject)
        factors = (Factor(atom, (*axes, scaled(distance, affine.sign))),)
    dims = [tuple(affine.layout.groups.get(label, ())) for label in LABELS[: len(value.shape)]]
    dims.insert(dim, (variable,))
    box = tuple((0, each) for each in shape)
    term = table.settle(Term(ONE, factors, {**affine.layout.ranges, variable: (0, size)}, tuple(dims), box))
    return Value(shape, () if term is None else (term,))


def _one_hot_of_choice(table: Table, value: Value, size: int, dim: int) -> Value:
    """Each row where it is chosen, and the row of the number that the tensor is elsewhere."""
    shape = (*value.shape[:dim], size, *value.shape[dim:])
    rows, masks, base = rows_of(table, value, size, dim)
    settled = [each for each in map(table.settle, masks) if each is not None]
    elsewhere = negate(table, Value(value.shape, merged(table, settled)))
    for term in elsewhere.terms:
        row = table.settle(row_at(term, size, dim, next(table.names), None, base))
        rows += [] if row is None else [row]
    return Value(shape, tuple(rows))
