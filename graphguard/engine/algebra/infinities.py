"""Which atoms may be minus infinity, the log of a mask, or hold it inside.

Infinity minus infinity, and zero times infinity, are no numbers. The sequential program is taken to be defined; of the
ranks, terms with such atoms are never cancelled, and never multiplied away.
"""

from __future__ import annotations

from collections.abc import Callable

from graphguard.engine.store.journal import asked
from graphguard.engine.store.positive import is_positive
from graphguard.engine.store.table import Table
from graphguard.engine.terms.definition import Definition
from graphguard.engine.terms.lane import varies
from graphguard.engine.terms.term import Atom, Factor, Term, Value, substitute

FINITE = ("finite",)  # the parameters of the largest of elements of which some are masked, but not all
# Numbers, even of infinities.
BOUNDED = frozenset({"exp", "sigmoid", "tanh", "argmax", "argmin", "topk_indices", "argsort", "eq", "lt", "le", "positive"})


@asked
def may_hold_infinity(table: Table, atom: Atom) -> bool:
    """Whether the exp of an atom may be that of minus infinity, however deep inside that is."""
    return table.facts.is_infinite(atom) or _answer(table, atom, _hides_infinity)


@asked
def may_be_infinite(table: Table, atom: Atom) -> bool:
    """Whether an atom itself may be minus infinity: exp of it is a number again."""
    return table.facts.is_infinite(atom) or _answer(table, atom, _is_infinite)


@asked
def may_be_garbage(table: Table, atom: Atom) -> bool:
    """Whether memory that nothing was written to is in an atom: that may hold no numbers."""
    return atom.kind == "unwritten" or _answer(table, atom, _has_garbage)


def _has_garbage(table: Table, definition: Definition) -> bool:
    return any(may_be_garbage(table, each) for each in _atoms_of(definition))


def _answer(table: Table, atom: Atom, answered: Callable[[Table, Definition], bool]) -> bool:
    """The answer is a function of definitions alone, so that it is given once."""
    known = table.answers[answered.__name__]
    answer: bool | None = known.get(atom.id)
    if answer is None:
        definition = table.definitions.get(atom)
        answer = known[atom.id] = definition is not None and answered(table, definition)
    return answer


def _hides_infinity(table: Table, definition: Definition) -> bool:
    if definition.parameters == FINITE:
        return False
    inside = _atoms_of(definition)
    if definition.name == "log":
        return not inside or not all(each.positive and not may_hold_infinity(table, each) for each in inside)
    return any(may_hold_infinity(table, each) for each in inside)


def _is_infinite(table: Table, definition: Definition) -> bool:
    if definition.parameters == FINITE or definition.name in BOUNDED:
        return False
    if definition.name == "clamp" and definition.parameters[0] is not None:
        return False
    inside = _atoms_of(definition)
    if definition.name == "log":
        return not inside or any(may_be_masked_out(table, each) for each in inside)
    return any(not each.indicator and each.kind != "delta" and may_be_infinite(table, each) for each in inside)


@asked
def may_be_masked_out(table: Table, atom: Atom) -> bool:
    """Whether a mask makes an atom zero. That data is zero where a log is taken of it is another matter: there the
    sequential program is not defined, as where it divides by it."""
    if atom.indicator or atom.kind == "delta" or may_hold_infinity(table, atom):
        return True
    return not atom.positive and _answer(table, atom, _has_mask)


def _has_mask(table: Table, definition: Definition) -> bool:
    return any(may_be_masked_out(table, each) for each in _atoms_of(definition))


def _atoms_of(definition: Definition) -> list[Atom]:
    return [factor.atom for operand in definition.operands for product in operand for factor in product.factors]


def is_log_of_nothing(table: Table, term: Term) -> bool:
    """Whether the term is a multiple of log 0."""
    if len(term.factors) != 1 or term.factors[0].power != 1 or varies(term.weight):
        return False
    definition = table.definitions.get(term.factors[0].atom)
    return definition is not None and definition.name == "log" and definition.operands == ((),)


def has_garbage(table: Table, value: Value | Term) -> bool:
    terms = value.terms if isinstance(value, Value) else (value,)
    return any(may_be_garbage(table, factor.atom) for term in terms for factor in term.factors)


def has_infinities(table: Table, value: Value | Term) -> bool:
    terms = value.terms if isinstance(value, Value) else (value,)
    return any(
        may_be_infinite(table, factor.atom) and not _is_log_of_weights(table, factor, term)
        for term in terms
        for factor in term.factors
    )


def _is_log_of_weights(table: Table, factor: Factor, term: Term) -> bool:
    """Whether a log is of what is above zero wherever the term reads it: of a row of which a mask leaves some."""
    definition = table.definitions.get(factor.atom)
    if definition is None or definition.name != "log" or len(definition.operands[0]) != 1 or definition.operands[0][0].extents:
        return False
    axes = {-1 - n: index for n, index in enumerate(factor.at)}
    inside = substitute(definition.operands[0][0].factors, axes)
    return all(
        not may_hold_infinity(table, each.atom) and is_positive(table, each, term.ranges, term.weight) for each in inside
    )
