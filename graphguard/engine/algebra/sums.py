"""Sums of several products as atoms, and finding them again inside larger sums, under whatever else multiplies them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from graphguard.engine.algebra.alike import same_term, signature
from graphguard.engine.algebra.expansion import written_out
from graphguard.engine.algebra.grid import by_cell, in_cells
from graphguard.engine.algebra.merge import merged
from graphguard.engine.algebra.product import Layout
from graphguard.engine.store.folding import signs
from graphguard.engine.store.step_counts import is_count
from graphguard.engine.store.table import Table
from graphguard.engine.terms.definition import Part, Product
from graphguard.engine.terms.lane import collapse, equal
from graphguard.engine.terms.term import (
    IMPULSE,
    STEP,
    WINDOW,
    Atom,
    Factor,
    Index,
    Term,
    Undescribed,
    Value,
    extent,
    mentioned,
    substituted,
    weighted,
)


def plain(table: Table, terms: Sequence[Term]) -> Term | None:
    """One term without sums for several terms that cover the same box; None for zero."""
    if not terms:
        return None
    closed = []
    for term in terms:
        term = table.filed(term)
        if term.summed:
            raise Undescribed("a sum over parts of different sizes")
        closed.append(term)
    if len(closed) == 1:
        return closed[0]
    total = sum_of(table, closed)
    _register(table, next(f.atom for f in total.factors if f.atom.kind == "lin"))
    return total


def one_term(table: Table, value: Value) -> Value:
    """The same tensor with at most one term, without sums, on each cell of its grid."""
    if len(value.terms) == 1 and not value.terms[0].summed:
        return value
    return by_cell(table, [value], lambda cells, _: plain(table, cells[0]))


def named(table: Table, value: Value) -> Value:
    """The same tensor with an atom for the sum on each cell. Pieces that lie in windows stay apart, as those in boxes do."""
    value = folded(table, value)
    if len(value.terms) < 2:
        return value
    cuts = (WINDOW, IMPULSE, STEP) if table.limits.step_cases else (WINDOW, IMPULSE)  # cases of a mask are pieces, too
    apart = [term for term in value.terms if any(f.atom in cuts for f in term.factors)]
    rest = [term for term in value.terms if not any(term is other for other in apart)]
    together = one_term(table, Value(value.shape, tuple(rest))).terms if rest else ()
    return Value(value.shape, (*together, *apart))


def folded(table: Table, value: Value) -> Value:
    """The same tensor with known sums in place of their members."""
    if len(value.terms) > 1 and table.limits.step_cases:
        value = Value(value.shape, tuple(_recounted(table, list(value.terms))))
    if len(value.terms) < 2 or not any(table.sums.sums_with(f.atom) for term in value.terms for f in term.factors):
        return value
    terms = _folded(table, list(value.terms))
    if len(terms) == len(value.terms) and not one_box(terms):
        try:
            cells = [(_refolded(table, inside), len(inside)) for _, inside in in_cells(table, value)]
        except Undescribed:
            return value
        if any(len(inside) < count for inside, count in cells):
            terms = list(merged(table, [term for inside, _ in cells for term in inside]))
    return Value(value.shape, tuple(terms))


def _folded(table: Table, terms: list[Term]) -> list[Term]:
    while len(terms) > 1:
        found = _fold_once(table, terms) or _fold_aligned(table, terms)
        if found is None:
            break
        terms = found
    return terms


def _fold_aligned(table: Table, terms: list[Term]) -> list[Term] | None:
    """As _fold_once, for terms of one box whose dims are split in different ways: they are split alike first."""
    if not any(len({len(group) for group in groups}) > 1 for groups in zip(*(t.dims for t in terms), strict=True)):
        return None
    if not one_box(terms):
        return None
    labels = "".join(chr(97 + dim) for dim in range(len(terms[0].box)))
    layout = Layout(table)
    try:
        for term in terms:
            layout.lay(term, labels)
    except Undescribed:
        return None
    dims = tuple(tuple(layout.groups[label]) for label in labels)
    visible = {v for group in dims for v in group}
    aligned = [
        term.with_(factors=factors, dims=dims, ranges={v: layout.ranges[v] for v in (visible | mentioned(factors))})
        for term, factors in zip(terms, layout.parts, strict=True)
    ]
    found = _fold_once(table, aligned)
    return None if found is None else [each for each in map(table.settle, found) if each is not None]


def _refolded(table: Table, terms: list[Term]) -> list[Term]:
    """The terms of one cell, folded. A sum that was found where the others are not may be part of a larger one here."""
    best = _folded(table, terms)
    sums = {f.atom for term in best for f in term.factors if f.atom.kind == "lin" and f.power == 1}
    for atom in sorted(sums, key=lambda each: -each.id) if len(best) > 1 else ():
        again = _folded(table, [each for term in best for each in written_out(table, term, atom)])
        if len(again) < len(best):
            best = again
    return best


def _recounted(table: Table, terms: list[Term]) -> list[Term]:
    """The terms with named sums that count written out, where a number beside them is part of the count."""
    for term in terms:
        for factor in term.factors:
            if factor.atom.kind == "lin" and factor.power == 1 and _counts(table, factor.atom):
                written = [each for other in terms for each in written_out(table, other, factor.atom)]
                again = _folded(table, list(merged(table, written)))
                if len(again) < len(terms):
                    return _recounted(table, again)
    return terms


def _counts(table: Table, atom: Atom) -> bool:
    return any(is_count(table, factor) for product in table.definitions[atom].operands[0] for factor in product.factors)


def one_box(terms: Sequence[Term]) -> bool:
    first = terms[0].box
    return all(equal(a[n], b[n]) for term in terms for a, b in zip(first, term.box, strict=True) for n in (0, 1))


def sum_of(table: Table, terms: Sequence[Term]) -> Term:
    """An atom for the sum of several terms without sums that cover the same box. A step that multiplies them all stays outside:
    where it is known to be 1, as in a block that a causal mask leaves whole, the terms come without it."""
    labels = "".join(chr(97 + dim) for dim in range(len(terms[0].box)))
    layout = Layout(table)
    for term in terms:
        layout.lay(term.with_(factors=weighted(term)), labels)
    lead = max(range(len(terms)), key=lambda n: ([(f.atom.id, f.power) for f in terms[n].factors], terms[n].coefficient))
    scale = terms[lead].coefficient
    common = [
        f for f in layout.parts[0] if _stays_outside(table, f) and all(any(_same(f, g) for g in part) for part in layout.parts)
    ]
    inner = [tuple(f for f in part if not any(_same(f, each) for each in common)) for part in layout.parts]
    parts = [Part((0, t.coefficient / scale), factors) for t, factors in zip(terms, inner, strict=True)]
    atom, axes = table.define("lin", "sum", (), 1, parts, layout.ranges, **_signs(parts))
    dims = tuple(tuple(layout.groups.get(label, ())) for label in labels)
    settled = table.settle(Term(scale, (*common, Factor(atom, axes)), layout.ranges, dims, terms[0].box))
    assert settled is not None
    return settled


def _stays_outside(table: Table, factor: Factor) -> bool:
    """A step; and, where masks are described case by case, the shift of weights by their largest score, which cancels."""
    if factor.atom is STEP or not table.limits.step_cases or not factor.atom.positive:
        return factor.atom is STEP
    definition = table.definitions.get(factor.atom)
    return definition is not None and definition.name == "exp"


def _same(a: Factor, b: Factor) -> bool:
    return a.atom is b.atom and a.power == b.power and a.place == b.place


def _signs(parts: Sequence[Part]) -> dict[str, bool]:
    each = [signs(part.factors) for part in parts]
    nonnegative = all(part.label[1] > 0 and sign["nonnegative"] for part, sign in zip(parts, each, strict=True))  # type: ignore[index]
    return {"positive": nonnegative and any(sign["positive"] for sign in each), "nonnegative": nonnegative}


def _register(table: Table, atom: Atom) -> None:
    """Note the sum under the youngest atom of its lead."""
    lead = _lead(table.definitions[atom].operands[0])
    if lead.factors:
        table.sums.note_sum(max((f.atom for f in lead.factors), key=lambda member: member.id), atom)


def _lead(members: Sequence[Product]) -> Product:
    """The member that has most of the axes: positions that it does not have must be plain numbers."""
    return max(members, key=lambda p: len({v for f in p.factors for v in f.variables()}))


def _fold_once(table: Table, terms: list[Term]) -> list[Term] | None:
    for number, term in enumerate(terms):
        for factor in term.factors:
            for atom in table.sums.sums_with(factor.atom):
                rest = terms[:number] + terms[number + 1 :]
                found = _fold_into(table, atom, term, rest)
                if found is not None:
                    return found
    return None


def _fold_into(table: Table, atom: Atom, term: Term, rest: list[Term]) -> list[Term] | None:
    definition = table.definitions[atom]
    members = definition.operands[0]
    if len(members) > len(rest) + 1:
        return None
    lead = _lead(members)
    unified = _unify(lead, term, {})
    if unified is None:
        return None
    axes, others = unified
    scale = term.coefficient / _coefficient(lead)
    for member in members:
        if member is lead:
            continue
        if not _complete(member, term, rest, axes):
            return None
        factors = tuple(f._replace(at=tuple(substituted(i, axes) for i in f.at)) for f in member.factors)
        if any(f.atom.indicator and f.place == other.place for f in factors for other in others):
            return None  # δ (δ - p) is δ - δ p, but that is better left flat: its parts may yet cancel
        wanted = table.settle(term.with_(coefficient=scale * _coefficient(member), factors=(*factors, *others)))
        place = None if wanted is None else _place_of(table, wanted, rest)
        if place is None:
            return None
        rest = rest[:place] + rest[place + 1 :]
    at = tuple(axes[-1 - n] for n in range(definition.axes))
    settled = table.settle(term.with_(coefficient=scale, factors=(*others, Factor(atom, at))))
    return None if settled is None else [*rest, settled]


def _place_of(table: Table, wanted: Term, terms: Sequence[Term]) -> int | None:
    """Where a term is among others, which may not be in normal form."""
    for place, term in enumerate(terms):
        if term.coefficient == wanted.coefficient and signature(term) == signature(wanted):
            settled = term if same_term(term, wanted) else table.settle(term)
            if settled is not None and same_term(settled, wanted):
                return place
    return None


def _coefficient(product: Product) -> Fraction:
    return product.label[1]  # type: ignore[index, no-any-return]


def _complete(member: Product, lead: Term, rest: Sequence[Term], axes: dict[int, Index]) -> bool:
    """Find the axes that only this member has: positions in the dims that all members share."""
    missing = {v for f in member.factors for v in f.variables()} - axes.keys()
    if not missing:
        return True
    for term in rest:
        found = _unify(member, term, {})
        names = shared(term, lead)
        if found is None or names is None or any(v not in names for axis in missing for v, _ in found[0][axis].terms):
            continue
        axes.update({axis: substituted(found[0][axis], names) for axis in missing})
        return True
    return False


def shared(term: Term, lead: Term) -> dict[int, Index] | None:
    """The variables of one term's dims as positions of another's."""
    names: dict[int, Index] = {}
    for mine, its in zip(term.dims, lead.dims, strict=True):
        if len(mine) != len(its):
            return None
        for v, w in zip(mine, its, strict=True):
            if not equal(extent(term.ranges[v]), extent(lead.ranges[w])):
                return None
            names[v] = Index(((w, 1),), collapse(term.ranges[v][0] - lead.ranges[w][0]))
    return names


def _unify(product: Product, term: Term, axes: dict[int, Index]) -> tuple[dict[int, Index], list[Factor]] | None:
    """The positions at which the term has the product's factors, and its other factors."""
    left = list(term.factors)
    for wanted in product.factors:
        for place, factor in enumerate(left):
            found = _fit(wanted, factor, axes) if factor.atom is wanted.atom and factor.power == wanted.power else None
            if found is not None:
                axes = found
                del left[place]
                break
        else:
            return None
    return axes, left


def _fit(wanted: Factor, factor: Factor, axes: dict[int, Index]) -> dict[int, Index] | None:
    """The axes, with those that the factor settles; None if it is read elsewhere."""
    axes = dict(axes)
    for index, position in zip(wanted.at, factor.at, strict=True):
        start = _unshifted(position, index)
        known = axes.setdefault(index.terms[0][0], start)
        if known is not start and known.key != start.key:
            return None
    return axes


def _unshifted(position: Index, index: Index) -> Index:
    """The axis, where a definition reads at some distance from it."""
    return position if equal(index.offset, 0) else Index(position.terms, collapse(position.offset - index.offset))
