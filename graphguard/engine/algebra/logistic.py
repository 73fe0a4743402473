"""The logistic function, sigmoid(x) = exp(x) / (1 + exp(x)), among exponentials and logs.

It is a function of its own where the sequential program uses it. Where only the ranks do, or where it meets logs, it is the
share A / (A + B) with A / B = exp(x): so blocks of attention that are weighed by the sigmoid of the distance of their
log-sum-exps are weighed by their sums. And 1 / (1 + exp(-x)) is the sequential program's sigmoid(x), if it has that.
"""

from __future__ import annotations

from graphguard.engine.algebra.function import apply, exp, log, power, settled_as_one, with_open_sum
from graphguard.engine.algebra.grid import covers, piecewise
from graphguard.engine.algebra.product import constant, multiply
from graphguard.engine.algebra.sums import folded
from graphguard.engine.algebra.value import add, scale
from graphguard.engine.store.table import Table
from graphguard.engine.terms.term import ONE, Atom, Term, Value


def sigmoid(table: Table, value: Value) -> Value:
    """sigmoid(x), which is 1 - sigmoid(-x), and sigmoid(log A - log B) is A / (A + B)."""
    if any(_has_log(table, factor.atom) for term in value.terms for factor in term.factors):
        return piecewise(table, value, lambda each: _share(table, folded(table, each)) or apply(table, "sigmoid", [each]))
    found = apply(table, "sigmoid", [value])
    if table.recording:
        for term in found.terms:
            table.sums.file(term.factors[0].atom)
        return found
    if _is_filed(table, found):
        return found
    return _complement(table, value) or _share(table, folded(table, value)) or found


def reciprocal(table: Table, value: Value) -> Value | None:
    """1 / (1 + exp(-x)) as the sequential program's sigmoid(x); None if it is not that."""
    if len(value.terms) != 2 or not all(covers(term.box, value.shape) and not term.summed for term in value.terms):
        return None
    ones = [term for term in value.terms if not term.factors]
    rest = [term for term in value.terms if term.factors]
    if len(ones) != 1 or not all(t.coefficient == 1 and type(t.weight) is int and t.weight == 1 for t in value.terms):
        return None
    if not all(_name(table, factor.atom) == "exp" and factor.atom.positive for factor in rest[0].factors):
        return None
    exponent = log(table, Value(value.shape, tuple(rest)))
    found = apply(table, "sigmoid", [scale(exponent, -ONE)])
    return found if _is_filed(table, found) else _complement(table, scale(exponent, -ONE))


def _complement(table: Table, value: Value) -> Value | None:
    """1 - sigmoid(-x), if the sequential program has that sigmoid."""
    found = apply(table, "sigmoid", [scale(value, -ONE)])
    return add(table, [constant(value.shape, ONE, table), scale(found, -ONE)]) if _is_filed(table, found) else None


def _is_filed(table: Table, value: Value) -> bool:
    return bool(value.terms) and all(table.sums.is_filed(term.factors[0].atom) for term in value.terms)


def _has_log(table: Table, atom: Atom) -> bool:
    if atom.kind != "lin":
        return _name(table, atom) == "log"
    return any(_has_log(table, f.atom) for product in table.definitions[atom].operands[0] for f in product.factors)


def _name(table: Table, atom: Atom) -> str | None:
    definition = table.definitions.get(atom)
    return None if definition is None else definition.name


def _share(table: Table, value: Value) -> Value | None:
    """A / (A + B), where A / B is the exp of the value; None where that is no product."""
    ratio = exp(table, value, opened=False)
    if not ratio.terms or any(term.summed for term in ratio.terms) or not _is_everywhere(ratio):
        return None
    a, b = (Value(ratio.shape, tuple(_opened(table, each) for each in map(part, ratio.terms))) for part in (_above, _below))
    labels = "".join(chr(97 + dim) for dim in range(len(ratio.shape)))
    return multiply(table, [a, power(table, add(table, [a, b]), -ONE)], [labels, labels], labels)


def _is_everywhere(ratio: Value) -> bool:
    """Whether every element has a term: where there is none, the value is minus infinity."""
    return len(ratio.terms) == 1 and covers(ratio.terms[0].box, ratio.shape)


def _above(term: Term) -> Term:
    return term.with_(factors=tuple(f for f in term.factors if f.power > 0))


def _below(term: Term) -> Term:
    return term.with_(coefficient=ONE, factors=tuple(f._replace(power=-f.power) for f in term.factors if f.power < 0))


def _opened(table: Table, term: Term) -> Term:
    return settled_as_one(table, with_open_sum(table, term))
