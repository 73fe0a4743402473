"""Masks of positions that put a large number in the place of scores: exp of them, case by case.

    exp(step[p] · s + (1 - step[p]) · c)  is  step[p] · exp(s) + step[1 - p] · exp(c)        p a whole number

A mask by minus infinity is the log of a step, and exp undoes it. With a number in its place, such as -1e30, what is masked
counts for something over the real numbers: in this form it is added up as everything else is.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphguard.engine.algebra.expansion import written_out
from graphguard.engine.algebra.grid import covers
from graphguard.engine.algebra.merge import merged
from graphguard.engine.algebra.product import Layout
from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import varies
from graphguard.engine.terms.term import ONE, STEP, Factor, Index, Term, Undescribed, Value, combined, mentioned, scaled

LARGE = 1000  # what is added to scores is a mask from here on


def cases_of(table: Table, value: Value) -> list[tuple[Value, Value]] | None:
    """A mask and the tensor where it is 1, for each of two masks of which one is 1 everywhere; None if no step masks scores."""
    if any(varies(term.weight) or not covers(term.box, value.shape) for term in value.terms):
        return None
    written = [each for term in value.terms for each in _written(table, term)]
    if not any(_is_mask(term) for term in written) or table.over("step_cases", 1):
        return None
    try:
        terms = _aligned(table, written)
    except Undescribed:
        return None
    step = next(term.factors[0] for term in terms if _is_mask(term))
    if not set(step.variables()) <= terms[0].visible:
        return None
    other = Factor(STEP, (combined([scaled(step.at[0], -1), Index((), 1)]),))
    found = []
    for holds, fails in ((step, other), (other, step)):
        inside = [_without(term, holds) for term in terms if not _has(term, fails)]
        settled = [each for each in map(table.settle, inside) if each is not None]
        mask = table.settle(terms[0].with_(coefficient=ONE, factors=(holds,), ranges=_own(terms[0])))
        if mask is not None:
            found.append((Value(value.shape, (mask,)), Value(value.shape, merged(table, settled))))
    return found


def _written(table: Table, term: Term) -> list[Term]:
    """A term, with a named sum in which a large number masks written out."""
    if len(term.factors) != 1 or term.factors[0].atom.kind != "lin" or term.factors[0].power != 1:
        return [term]
    atom = term.factors[0].atom
    numbers = [product.label[1] for product in table.definitions[atom].operands[0] if _is_step(product.factors)]  # type: ignore[index]
    return list(written_out(table, term, atom)) if any(abs(term.coefficient * each) >= LARGE for each in numbers) else [term]


def _is_step(factors: Sequence[Factor]) -> bool:
    return len(factors) == 1 and factors[0].atom is STEP and factors[0].power == 1


def _is_mask(term: Term) -> bool:
    """A large number at the positions that a step leaves."""
    return _is_step(term.factors) and not term.summed and abs(term.coefficient) >= LARGE


def _aligned(table: Table, terms: Sequence[Term]) -> list[Term]:
    """The terms over the same variables."""
    labels = "".join(chr(97 + dim) for dim in range(len(terms[0].box)))
    layout = Layout(table)
    for term in terms:
        layout.lay(term, labels)
    dims = tuple(tuple(layout.groups[label]) for label in labels)
    visible = {v for group in dims for v in group}
    return [
        term.with_(factors=factors, dims=dims, ranges={v: layout.ranges[v] for v in (visible | mentioned(factors))})
        for term, factors in zip(terms, layout.parts, strict=True)
    ]


def _own(term: Term) -> dict[int, object]:
    return {v: span for v, span in term.ranges.items() if v in term.visible}


def _has(term: Term, step: Factor) -> bool:
    return any(factor.place == step.place for factor in term.factors)


def _without(term: Term, step: Factor) -> Term:
    return term.with_(factors=tuple(factor for factor in term.factors if factor.place != step.place))
