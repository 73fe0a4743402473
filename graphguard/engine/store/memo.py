"""Descriptions made once for all layers that are alike.

A description is kept with the form of its operands, which is all but their atoms, and with the steps that it took at the table.
For operands of the same form the steps are taken again with their atoms; if all answers are alike, the result is the kept one
with the new atoms in place of the old. Wherever anything differs, it is described anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from graphguard.engine.store.table import Table
from graphguard.engine.store.trace import Images, Trace, facts_of
from graphguard.engine.terms.lane import key
from graphguard.engine.terms.term import FIRST_ID, SPECIAL, Atom, Factor, Term, Value, Variable

MOST_VARIANTS = 3  # of descriptions kept for operands of one form
_FIXED: Images = {atom.id: atom for atom in SPECIAL}


class Form(NamedTuple):
    """A description in two parts: what it is but for its atoms, as a number, and its atoms in the order of their first use."""

    number: int
    atoms: tuple[Atom, ...]


class _Kept(NamedTuple):
    atoms: tuple[Atom, ...]  # of the operands
    trace: Trace
    results: tuple[Value | int, ...]  # a number: the operand itself


class Memo:
    def __init__(self, table: Table):
        self._table = table
        self._numbers: dict[Hashable, int] = {}  # of forms
        self._forms: dict[int, tuple[Value, Form]] = {}  # by identity of the value, which is held so that it stays unique
        self._kept: dict[Hashable, list[_Kept]] = {}
        self.again = 0  # how many were not described anew

    def describe(
        self, what: Hashable, operands: Sequence[Value], make: Callable[[], Sequence[Any] | None]
    ) -> Sequence[Any] | None:
        """The results of `make`, which are a function of `what`, of the operands, and of the table."""
        forms = [self.form(value) for value in operands]
        atoms = tuple(atom for form in forms for atom in form.atoms)
        found = (what, tuple([form.number for form in forms]), _order(atoms), tuple([facts_of(atom) for atom in atoms]),
                 self._table.mode)  # fmt: skip
        kept = self._kept.setdefault(found, [])
        for each in reversed(kept):
            results = self._again(each, atoms, operands)
            if results is not None:
                self.again += 1
                return results
        with self._table.journal.tracing(atoms) as trace:
            made = make()
        if len(kept) < MOST_VARIANTS and trace.usable and _all_known(made, trace):
            kept.append(_Kept(atoms, trace, tuple(_place(value, operands) for value in made)))
        return made

    def _again(self, kept: _Kept, atoms: tuple[Atom, ...], operands: Sequence[Value]) -> list[Value] | None:
        images = dict(_FIXED)
        for old, new in zip(kept.atoms, atoms, strict=True):
            images[old.id] = new
        steps, asking = kept.trace.steps, kept.trace.asking
        for step in steps[:asking]:
            if not step(images):
                return None
        if not _keeps_order(images):  # before an attempt that fails changes anything: what is described anew would find it
            return None
        for step in steps[asking:]:
            if not step(images):
                return None
        if asking < len(steps) and not _keeps_order(images):
            return None
        return [operands[each] if isinstance(each, int) else self._renamed(each, images) for each in kept.results]

    def _renamed(self, value: Value, images: Images) -> Value:
        form = self.form(value)
        terms = []
        for term in value.terms:
            factors = tuple([Factor(images[f.atom.id], f.at, f.power) for f in term.factors])
            terms.append(Term(term.coefficient, factors, term.ranges, term.dims, term.box, term.weight))
        renamed = Value(value.shape, tuple(terms))
        self._forms[id(renamed)] = renamed, Form(form.number, tuple([images[atom.id] for atom in form.atoms]))
        return renamed

    # ------------------------------------------------------------------ forms
    def form(self, value: Value) -> Form:
        known = self._forms.get(id(value))
        if known is None:
            slots: dict[int, int] = {}
            atoms: list[Atom] = []
            for term in value.terms:
                for factor in term.factors:
                    if factor.atom.id not in slots and factor.atom.id >= FIRST_ID:
                        slots[factor.atom.id] = len(atoms)
                        atoms.append(factor.atom)
            shape = tuple([key(size) for size in value.shape]), tuple([_term(term, slots) for term in value.terms])
            form = Form(self._numbers.setdefault(shape, len(self._numbers)), tuple(atoms))
            known = self._forms[id(value)] = value, form
        return known[1]


def _term(term: Term, slots: dict[int, int]) -> Hashable:
    """All of a term but its atoms and the names of its variables."""
    names: dict[Variable, int] = {}
    for variable in _variables(term):
        names.setdefault(variable, len(names))
    factors = tuple([
        (slots.get(f.atom.id, -1 - f.atom.id), _number(f.power),
         tuple([(tuple([(names[v], s) for v, s in i.terms]), key(i.offset)) for i in f.at]))
        for f in term.factors
    ])  # fmt: skip
    spans = tuple([_span(term.ranges[v]) for v in names])
    dims = tuple([tuple([names[v] for v in dim]) for dim in term.dims])
    return _number(term.coefficient), factors, spans, dims, tuple([_span(span) for span in term.box]), key(term.weight)


def _variables(term: Term) -> Iterator[Variable]:
    for dim in term.dims:
        yield from dim
    for factor in term.factors:
        yield from factor.variables()
    yield from term.ranges


def _span(span: tuple[Any, Any]) -> Hashable:
    return key(span[0]), key(span[1])


def _number(number: Fraction) -> Hashable:
    """As an int where it is one, which is quicker to look up."""
    return number.numerator if number.denominator == 1 else number


def _order(atoms: Sequence[Atom]) -> tuple[int, ...]:
    """Which atoms are the same, and which are older: the normal form sorts by age."""
    if len(atoms) < 2:
        return ()
    ids = [atom.id for atom in atoms]
    ranks = {each: rank for rank, each in enumerate(sorted(set(ids)))}
    return tuple([ranks[each] for each in ids])


def _keeps_order(images: Images) -> bool:
    """Whether older atoms are the images of older ones, and no two are the image of one."""
    if len(images) < len(_FIXED) + 2:
        return True
    last = -1
    for old in sorted(images):
        if images[old].id <= last:
            return False
        last = images[old].id
    return True


def _all_known(made: Sequence[Any] | None, trace: Trace) -> TypeGuard[Sequence[Value]]:
    """Whether all is described, by atoms that the trace knows."""
    if made is None or not all(isinstance(value, Value) for value in made):
        return False
    return trace.knows(f.atom.id for value in made for term in value.terms for f in term.factors)


def _place(value: Value, operands: Sequence[Value]) -> Value | int:
    return next((place for place, operand in enumerate(operands) if operand is value), value)


def word(arg: Any) -> Hashable:
    """An argument that is no tensor, for a key: 1, 1.0 and True are different."""
    if isinstance(arg, np.ndarray):
        return "lanes", arg.tobytes()
    return type(arg), arg
