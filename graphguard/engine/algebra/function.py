"""Elementwise functions of described tensors, and the few of them that the algebra sees through: powers, exp, log, deltas.

A function of terms is an atom over the positions in them. Powers of products are products of powers for whole powers or
factors alone that are not negative; exp turns sums into products, whose factors are positive; log undoes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from fractions import Fraction

import numpy as np

from graphguard.engine.algebra.alike import same_term
from graphguard.engine.algebra.domain import domain_of
from graphguard.engine.algebra.grid import Box, by_cell, covers, piecewise
from graphguard.engine.algebra.infinities import is_log_of_nothing, may_be_garbage, may_be_masked_out, may_hold_infinity
from graphguard.engine.algebra.product import Layout, constant, filled, multiply
from graphguard.engine.algebra.recognise import recognised
from graphguard.engine.algebra.step_cases import cases_of
from graphguard.engine.algebra.sums import folded, plain
from graphguard.engine.algebra.value import add, masked, taken
from graphguard.engine.store.need import DEFINED, NOT_NEGATIVE, NOT_ZERO
from graphguard.engine.store.positive import is_positive as is_positive_at
from graphguard.engine.store.table import Table
from graphguard.engine.terms.definition import Part, Product
from graphguard.engine.terms.lane import Lane, varies
from graphguard.engine.terms.term import (
    ONE,
    Factor,
    Index,
    Range,
    Term,
    Undescribed,
    Value,
    Variable,
    substituted,
    weighted,
)

INDICATORS = {"eq", "lt", "le", "isnan", "isinf", "positive", "nonzero"}
POSITIVE = {"sigmoid", "softplus", "cosh", "normal_share"}
NONNEGATIVE = {"relu", "abs"}
ODD = {"sin", "tan", "tanh", "sinh", "asinh", "atan", "asin", "atanh", "sign", "trunc"}
EVEN = {"cos", "cosh", "abs"}
MOST_BITS_OF_A_POWER = 1000  # a float holds no more
ZERO_AT_ZERO = {
    "relu",
    "positive",
    "abs",
    "tanh",
    "sin",
    "sinh",
    "asinh",
    "atan",
    "sign",
    "floor",
    "ceil",
    "round",
    "trunc",
}

EXACT: dict[str, Callable[..., Fraction | int]] = {  # of rational numbers, rational numbers
    "abs": abs,
    "sign": lambda x: (x > 0) - (x < 0),
    "floor": math.floor,
    "ceil": math.ceil,
    "round": round,
    "trunc": math.trunc,
    "relu": lambda x: max(x, 0),
    "positive": lambda x: x > 0,
    "nonzero": lambda x: x != 0,
    "eq": lambda a, b: a == b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "maximum": max,
    "minimum": min,
}


COMPARISONS = {"eq": (1, 0, 0), "lt": (0, 1, 0), "le": (1, 1, 0)}  # of equal, of less with more, of more with less


def by_weight(
    table: Table, values: Sequence[Value], work: Callable[[Sequence[Value]], Value], shape: Sequence[Lane] | None = None
) -> Value:
    """Nonlinear work where lanes have different shares of the operands: done for each kind of lane, and put together. shape: of
    the result, if it is not that of the first operand."""
    varying = [term.weight for value in values for term in value.terms if isinstance(term.weight, np.ndarray)]
    if not varying:
        return work(values)
    weights = np.stack(varying)
    kinds = np.unique(weights, axis=1)
    if table.over("shares", kinds.shape[1]):
        raise Undescribed("a function of what ranks hold in many different shares")
    parts = []
    for kind in kinds.T:
        there = (weights == kind[:, None]).all(axis=0)
        first = int(np.flatnonzero(there)[0])
        lanes = np.where(there, np.arange(len(there)), first)  # the other lanes look like one that is there, and do not count
        result = work([folded(table, taken(table, value, lanes)) for value in values])
        made = Value(values[0].shape if shape is None else tuple(shape), result.terms)
        parts.append(masked(table, made, np.asarray(there, dtype=np.int64)))
    return add(table, parts)


def apply(table: Table, name: str, values: Sequence[Value], parameters: tuple[Hashable, ...] = ()) -> Value:
    """An elementwise function of tensors of one shape."""
    values = [folded(table, value) for value in values]
    return by_weight(table, values, lambda each: _applied(table, name, each, parameters))


def _applied(table: Table, name: str, values: Sequence[Value], parameters: tuple[Hashable, ...]) -> Value:

    def on_cell(cells: list[list[Term]], box: Box) -> Term | None:
        operands = [_operand(table, cell) for cell in cells]
        if name in ZERO_AT_ZERO and all(term is None for term in operands):
            return None
        if name == "maximum" and any(_is_nothing(table, term) for term in operands):  # of anything and minus infinity
            return next((term for term in operands if not _is_nothing(table, term)), operands[0])
        number = _of_numbers(name, operands, parameters)
        if number is None and name in COMPARISONS:
            number = _compared(table, name, operands)
        if number is not None:
            return settled_as_one(table, filled(table, box)).with_(coefficient=number) if number else None
        if name == "positive":
            operands = [_rectified(table, operands[0])]
        if name in ODD | EVEN and operands[0] is not None and operands[0].coefficient < 0:
            turned = operands[0].with_(coefficient=-operands[0].coefficient)
            term = _function(table, name, [turned], parameters, box)
            return term if name in EVEN else term.with_(coefficient=-term.coefficient)
        if name == "log" and operands[0] is not None:
            if _number(operands[0]) == 1:
                return None
            _note_log(table, operands[0])
        return _function(table, name, operands, parameters, box)

    return by_cell(table, values, on_cell)


def _is_nothing(table: Table, term: Term | None) -> bool:
    """Whether a term is minus infinity, or that and what is finite."""
    return term is not None and _is_exp_of_nothing(table, [term])


def _compared(table: Table, name: str, operands: Sequence[Term | None]) -> Fraction | None:
    """What a comparison of something with itself gives, or of minus infinity with that or with what is finite."""
    of_equal, of_less, of_more = COMPARISONS[name]
    one, other = operands
    factors = [[] if term is None else term.factors for term in operands]
    if any(may_be_garbage(table, f.atom) for each in factors for f in each):  # which may be no number, and not equal to itself
        return None
    infinite = [any(may_hold_infinity(table, f.atom) for f in each) for each in factors]
    if one is not None and other is not None and not any(infinite) and same_term(one, other):
        return Fraction(of_equal)
    nothing = [_is_nothing(table, term) for term in operands]
    if all(nothing):
        return Fraction(of_equal)
    if nothing[0] and not infinite[1]:
        return Fraction(of_less)
    return Fraction(of_more) if nothing[1] and not infinite[0] else None


def _note_log(table: Table, term: Term) -> None:
    """Where the sequential program takes a log of one factor whose sign is not known, that is not negative. The log of a mask
    is minus infinity."""
    unsure = [f for f in term.factors if not f.atom.positive]
    if not table.recording or len(unsure) != 1 or unsure[0].power != 1 or term.coefficient < 0:
        return
    if not may_be_masked_out(table, unsure[0].atom):
        table.facts.note("nonnegative", unsure[0], term.ranges, table.shown)
        table.facts.note("logged", unsure[0], term.ranges, table.shown)


def _of_numbers(name: str, operands: Sequence[Term | None], parameters: tuple[Hashable, ...]) -> Fraction | None:
    """What a function makes of numbers, where that is exact: an optimizer's first step compares zeros with zero."""
    if name not in EXACT or parameters:
        return None
    numbers = [Fraction(0) if term is None else _number(term) for term in operands]
    known = [number for number in numbers if number is not None]
    return Fraction(EXACT[name](*known)) if len(known) == len(numbers) else None


def _number(term: Term) -> Fraction | None:
    if term.factors or term.summed or not isinstance(term.weight, int):
        return None
    return term.coefficient * term.weight


def _function(table: Table, name: str, operands: Sequence[Term | None], parameters: tuple[Hashable, ...], box: Box) -> Term:
    labels = "".join(chr(97 + dim) for dim in range(len(box)))
    layout = Layout(table)
    parts: list[tuple[int, Fraction]] = []
    weight: Lane = 1
    if all(term is None for term in operands):
        nothing = settled_as_one(table, filled(table, box))
        layout.lay(nothing, labels)
        layout.parts, box, weight = [], nothing.box, nothing.weight
    for number, term in enumerate(operands):
        if term is not None:
            layout.lay(term.with_(factors=weighted(term)), labels)
            parts.append((number, term.coefficient))
    products = [Part(label, factors) for label, factors in zip(parts, layout.parts, strict=True)]
    positive = name in POSITIVE or (name == "power" and _is_of_positive_number(table, operands))
    facts = {"positive": positive, "nonnegative": name in NONNEGATIVE, "indicator": name in INDICATORS}
    atom, axes = table.define("function", name, parameters, len(operands), products, layout.ranges, **facts)
    if domain_of(name, parameters) is not None:
        table.need(DEFINED, Factor(atom, axes), layout.ranges, weight)
    dims = tuple(tuple(layout.groups.get(label, ())) for label in labels)
    return settled_as_one(table, Term(ONE, (Factor(atom, axes),), layout.ranges, dims, box, weight))


def _is_of_positive_number(table: Table, operands: Sequence[Term | None]) -> bool:
    """Whether a power is of a number above 0, as the speeds of rotary embeddings are. To minus infinity it would be 0."""
    base, exponent = operands
    number = None if base is None else _number(base)
    if number is None or number <= 0 or exponent is None:
        return False
    return not any(may_hold_infinity(table, f.atom) or may_be_garbage(table, f.atom) for f in exponent.factors)


def _operand(table: Table, terms: Sequence[Term]) -> Term | None:
    """What a function gets on a cell, as the sequential program would write it."""
    term = plain(table, terms)
    return None if term is None else recognised(table, term)


def _rectified(table: Table, term: Term | None) -> Term | None:
    """For the sign of a term: a scale above 0 does not count, and relu(x) is above 0 exactly where x is."""
    if term is None or term.coefficient < 0 or varies(term.weight):
        return term
    inner = _inside(table, term, "relu")
    if inner is not None:
        return inner
    return term.with_(coefficient=ONE)


def _inside(table: Table, term: Term, name: str) -> Term | None:
    """What a function is of, if a term is nothing but a multiple of that function."""
    if len(term.factors) != 1 or term.factors[0].power != 1:
        return None
    definition = table.definitions.get(term.factors[0].atom)
    if definition is None or definition.name != name or not definition.operands[0]:
        return None
    (product,) = definition.operands[0]
    if product.extents:
        return None
    inner = instance(product, {-1 - n: index for n, index in enumerate(term.factors[0].at)})
    return settled_as_one(table, term.with_(coefficient=product.label[1], factors=inner))  # type: ignore[index]


def settled_as_one(table: Table, term: Term) -> Term:
    settled = table.settle(term)
    if settled is None:
        raise Undescribed("a function of nothing")
    return settled


def is_constant(value: Value) -> Fraction | None:
    """The number that fills the tensor in every lane."""
    if not value.terms:
        return Fraction(0)
    if len(value.terms) > 1:
        return None
    (term,) = value.terms
    whole = all(type(low) is int and low == 0 for low, _ in term.box)
    whole = whole and all(_equal(high, size) for (_, high), size in zip(term.box, value.shape, strict=True))
    return term.coefficient if whole and not term.factors and not term.summed and not varies(term.weight) else None


def is_positive(value: Value) -> bool:
    """Whether every element is known to be above 0."""
    if len(value.terms) != 1 or not covers(value.terms[0].box, value.shape):
        return False
    (term,) = value.terms
    return term.coefficient > 0 and not varies(term.weight) and not term.summed and all(f.atom.positive for f in term.factors)


def _equal(a: object, b: object) -> bool:
    return type(a) is int and type(b) is int and a == b


# ---------------------------------------------------------------------- powers
def power(table: Table, value: Value, exponent: Fraction) -> Value:
    """Each element to a rational power."""
    if exponent == 1:
        return value
    number = is_constant(value)
    if number is not None and number and exponent.denominator == 1:
        return constant(value.shape, number ** int(exponent), table)
    if exponent == 0:
        return constant(value.shape, ONE, table)
    return by_weight(table, [folded(table, value)], lambda each: _power(table, each[0], exponent))


def _power(table: Table, value: Value, exponent: Fraction) -> Value:
    def on_cell(cells: list[list[Term]], box: Box) -> Term | None:
        term = _operand(table, cells[0])
        if term is None:
            if exponent < 0:
                raise Undescribed("a division by zero")
            return None
        whole = exponent.denominator == 1
        if varies(term.weight):
            raise Undescribed("a power of what ranks hold in different shares")
        signed = _inside(table, term, "abs") if whole and exponent % 2 == 0 else None
        if signed is not None:
            term = signed.with_(coefficient=signed.coefficient * term.coefficient)
        simple = len(term.factors) == 1 and term.factors[0].power == 1
        if not whole and not (simple or all(f.atom.nonnegative for f in term.factors)):
            return _root_of_product(table, term, exponent, box)
        if not whole and term.coefficient < 0:
            return _function(table, "pow", [term], (exponent,), box)
        _need_power(table, term, exponent)
        scale = _rational_power(term.coefficient, exponent)
        factors = _raised(table, term, exponent)
        if factors is None:
            return _root_of_product(table, term, exponent, box)
        if scale is None:
            scale, roots = table.root(term.coefficient, exponent)
            factors = (*factors, *roots)
        raised = settled_as_one(table, term.with_(coefficient=scale, factors=factors))
        own = [f for f in raised.factors if f.atom.kind == "sum" and not table.sums.is_filed(f.atom)]
        return settled_as_one(table, with_open_sum(table, raised, own))  # the square of a norm may be part of a larger sum

    return by_cell(table, [value], on_cell)


def _need_power(table: Table, term: Term, exponent: Fraction) -> None:
    """A power below 0 divides; a root is of what is not negative."""
    for factor in term.factors:
        if exponent < 0 and factor.power > 0:
            table.need(NOT_ZERO, factor, term.ranges, term.weight)
        if exponent.denominator != 1 and factor.power.denominator == 1 and not factor.atom.nonnegative:
            table.need(NOT_NEGATIVE, factor, term.ranges, term.weight)


def _root_of_product(table: Table, term: Term, exponent: Fraction, box: Box) -> Term:
    """A root of factors whose signs are not known, as a function; a number above 0 comes out of it."""
    if term.coefficient <= 0:
        return _function(table, "pow", [term], (exponent,), box)
    scale, roots = table.root(term.coefficient, exponent)
    found = _function(table, "pow", [term.with_(coefficient=ONE)], (exponent,), box)
    return settled_as_one(table, found.with_(coefficient=scale, factors=(*found.factors, *roots)))


def _raised(table: Table, term: Term, exponent: Fraction) -> tuple[Factor, ...] | None:
    """A power of each factor. A root whose whole power would forget that its base is not negative is repeated instead."""
    raised: list[Factor] = []
    for factor in term.factors:
        power = factor.power * exponent
        forgets = power.denominator == 1 and factor.power.denominator != 1 and not factor.atom.nonnegative
        if not forgets or table.facts.holds("nonnegative", factor, term.ranges):
            raised.append(factor._replace(power=power))
        elif exponent.denominator == 1 and not table.over("root_copies", abs(int(exponent))):
            raised += [factor._replace(power=factor.power if exponent > 0 else -factor.power)] * abs(int(exponent))
        else:
            return None
    return tuple(raised)


def _rational_power(number: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator == 1:
        return number ** int(exponent)
    if number <= 0:
        return None
    if number == 1:
        return ONE
    root = Fraction(_root(number.numerator, exponent.denominator) or 0, _root(number.denominator, exponent.denominator) or 1)
    return root**exponent.numerator if root and root**exponent.denominator == number else None


def _root(number: int, degree: int) -> int | None:
    if number.bit_length() > MOST_BITS_OF_A_POWER:
        return None
    guess = round(number ** (1 / degree))
    return next((g for g in (guess - 1, guess, guess + 1) if g > 0 and g**degree == number), None)


# ---------------------------------------------------------------------- exp and log
def exp(table: Table, value: Value, opened: bool = True) -> Value:
    """exp(a + b) is exp(a) exp(b), and exp(c a) is exp(a) to the power c. A sum that is left over is open unless said."""
    return by_weight(table, [value], lambda each: _exp_by_cases(table, each[0], opened))


def _exp_by_cases(table: Table, value: Value, opened: bool) -> Value:
    cases = cases_of(table, value)
    if cases is None:
        return _exp(table, value, opened)
    labels = "".join(chr(97 + dim) for dim in range(len(value.shape)))
    parts = [(mask, _exp_by_cases(table, inside, opened)) for mask, inside in cases]
    return add(table, [multiply(table, part, [labels, labels], labels) for part in parts])


def _exp(table: Table, value: Value, opened: bool) -> Value:
    def on_cell(cells: list[list[Term]], box: Box) -> Term | None:
        labels = "".join(chr(97 + dim) for dim in range(len(box)))
        layout = Layout(table)
        if not cells[0]:
            return filled(table, box)
        factors: list[tuple[int, Fraction]] = []
        closed = [term for term in (plain(table, [each]) for each in cells[0]) if term is not None]
        if not table.recording and any(term.coefficient < 0 and is_log_of_nothing(table, term) for term in closed):
            raise Undescribed("exp of infinity")
        if _is_exp_of_nothing(table, closed):
            return None
        for term in closed:
            layout.lay(term.with_(factors=weighted(term)), labels)
            factors.append((len(layout.parts) - 1, term.coefficient))
        product = [f for place, scale in factors for f in _exp_factors(table, layout.parts[place], scale, layout.ranges)]
        dims = tuple(tuple(layout.groups.get(label, ())) for label in labels)
        term = Term(ONE, tuple(product), layout.ranges, dims, box)
        return table.settle(with_open_sum(table, term) if opened else term)

    return by_cell(table, [value], on_cell)


def _is_exp_of_nothing(table: Table, terms: Sequence[Term]) -> bool:
    """Whether minus infinity is added to what is finite: then exp is 0."""
    members = [member for term in terms for member in members_of(table, term)]
    masked_out = [term for term in members if term.coefficient > 0 and is_log_of_nothing(table, term)]
    rest = [term for term in members if not any(term is other for other in masked_out)]
    return bool(masked_out) and not any(may_hold_infinity(table, factor.atom) for term in rest for factor in term.factors)


def members_of(table: Table, term: Term) -> list[Term]:
    """A term, or the members of a named sum that it is a multiple of."""
    factor = term.factors[0] if len(term.factors) == 1 else None
    if factor is None or factor.atom.kind != "lin" or factor.power != 1:
        return [term]
    axes = {-1 - n: index for n, index in enumerate(factor.at)}
    found = []
    for product in table.definitions[factor.atom].operands[0]:
        scale = term.coefficient * product.label[1]  # type: ignore[index]
        found += members_of(table, term.with_(coefficient=scale, factors=instance(product, axes)))
    return found


def with_open_sum(table: Table, term: Term, among: Sequence[Factor] | None = None) -> Term:
    """The term with the one sum that a function left as an atom as a sum again: it may be part of a larger one."""
    sums = [f for f in term.factors if f.atom.kind == "sum"] if among is None else among
    if table.recording or len(sums) != 1 or sums[0].power != 1:
        return term
    ((product,),) = table.definitions[sums[0].atom].operands
    names: dict[int, Index] = {-1 - n: index for n, index in enumerate(sums[0].at)}
    ranges = dict(term.ranges)
    for number, size in enumerate(product.extents):
        variable = next(table.names)
        names[number], ranges[variable] = Index(((variable, 1),)), (0, size)
    rest = [f for f in term.factors if f is not sums[0]]
    return term.with_(factors=(*rest, *instance(product, names)), ranges=ranges)


def _exp_factors(table: Table, factors: tuple[Factor, ...], scale: Fraction, ranges: Mapping[Variable, Range]) -> list[Factor]:
    """exp of a product, as factors."""
    if len(factors) == 1 and factors[0].power == 1 and factors[0].atom in table.definitions:
        atom, at = factors[0].atom, factors[0].at
        definition = table.definitions[atom]
        axes = {-1 - n: index for n, index in enumerate(at)}
        if atom.kind == "lin":
            result = []
            for product in definition.operands[0]:
                result += _exp_factors(table, instance(product, axes), scale * product.label[1], ranges)  # type: ignore[index]
            return result
        if definition.name == "log" and definition.operands[0] and definition.operands[0][0].label == (0, ONE):
            inner = instance(definition.operands[0][0], axes)
            if scale == 1 or all(f.atom.positive or _is_row(f, scale) for f in inner):
                return _divided(table, [f._replace(power=f.power * scale) for f in inner], ranges)
    finite = not any(may_hold_infinity(table, factor.atom) for factor in factors)  # exp(log 0) is 0
    atom, positions = table.define("function", "exp", (), 1, [Part((0, ONE), factors)], {}, positive=finite, nonnegative=True)
    return _divided(table, [Factor(atom, positions, scale)], ranges)


def _divided(table: Table, factors: list[Factor], ranges: Mapping[Variable, Range]) -> list[Factor]:
    """The factors of an exp: of which some may be zero where a mask leaves nothing, and are divided by."""
    for factor in factors:
        if factor.power < 0:
            table.need(NOT_ZERO, factor, ranges)
    return factors


def _is_row(factor: Factor, scale: Fraction) -> bool:
    """Whether exp(scale · log) of a sum of weights, of which a mask may leave nothing, is a power of it. Where nothing is
    left, a negative scale is a division by zero in both forms, which is said where it is the ranks' alone."""
    whole = scale.denominator == 1 and factor.power.denominator == 1
    return whole and factor.atom.kind in ("sum", "lin") and factor.atom.nonnegative


def instance(product: Product, axes: dict[int, Index]) -> tuple[Factor, ...]:
    """A product of a definition at given positions."""
    return tuple(f._replace(at=tuple(substituted(i, axes) for i in f.at)) for f in product.factors)


def log(table: Table, value: Value) -> Value:
    """The log of positive factors is a sum of logs; log(exp(a)) is a."""
    return by_weight(table, [folded(table, value)], lambda each: piecewise(table, each[0], lambda piece: _log(table, piece)))


def _log(table: Table, value: Value) -> Value:
    if len(value.terms) != 1 or not covers(value.terms[0].box, value.shape):
        return apply(table, "log", [value])
    term = plain(table, value.terms)
    assert term is not None
    if varies(term.weight) or term.coefficient <= 0 or not term.factors or not _are_positive(table, term):
        return apply(table, "log", [value])
    parts: list[Value] = []
    for factor in term.factors:
        parts.append(Value(value.shape, _log_terms(table, term, factor)))
    if term.coefficient != 1:
        parts.append(apply(table, "log", [constant(value.shape, term.coefficient, table)]))
    return add(table, parts)


def _are_positive(table: Table, term: Term) -> bool:
    """Whether every factor is above zero where the term reads it. The log of one factor is the same either way."""
    if len(term.factors) == 1 and term.factors[0].power == 1:
        return term.factors[0].atom.positive
    return all(is_positive_at(table, factor, term.ranges, term.weight) for factor in term.factors)


def _log_terms(table: Table, term: Term, factor: Factor) -> tuple[Term, ...]:
    definition = table.definitions.get(factor.atom)
    if definition is not None and definition.name == "exp":
        (product,) = definition.operands[0]
        factors = instance(product, {-1 - n: index for n, index in enumerate(factor.at)})
        return (settled_as_one(table, term.with_(coefficient=factor.power, factors=factors)),)
    part = Part((0, ONE), (factor._replace(power=ONE),))
    return (
        settled_as_one(
            table, term.with_(coefficient=factor.power, factors=(Factor(*table.define("function", "log", (), 1, [part], {})),))
        ),
    )
