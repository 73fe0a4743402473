"""What communication does to descriptions: the operators of the dist namespace."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from graphguard.engine.algebra.function import apply
from graphguard.engine.algebra.sums import folded
from graphguard.engine.algebra.value import same, taken
from graphguard.engine.ranks import collective
from graphguard.engine.ranks.collective import Groups
from graphguard.engine.store.table import Table
from graphguard.engine.tensors.ops import Ops
from graphguard.engine.terms.definition import Part, Product
from graphguard.engine.terms.lane import collapse
from graphguard.engine.terms.term import Factor, Index, Term, Undescribed, Value, substitute


def reduced(ops: Ops, value: Value, groups: Groups, kwargs: dict[str, Any]) -> Value:
    """The reduction over each group, on every member."""
    table = ops.table
    match kwargs["reduce"]:
        case "sum":
            return folded(table, collective.all_reduce(table, value, groups))
        case "avg":
            return folded(table, collective.average(table, value, groups))
        case "premul_sum":
            scaled = ops.scale(value, kwargs["factor"])
            return folded(table, collective.all_reduce(table, scaled, groups))
        case "max":
            return _extreme(ops, value, groups, "maximum")
        case "min":
            return _extreme(ops, value, groups, "minimum")
        case "product":
            return functools.reduce(ops.mul, (taken(table, value, lanes) for lanes in groups.each(table)))
        case other:
            raise Undescribed(f"a reduction by {other}")


def gathered(ops: Ops, value: Value, groups: Groups, shape: tuple[int, ...]) -> Value:
    """The members' tensors joined in memory order."""
    if not value.shape:
        value = ops.reshape(value, [1])
    joined = collective.all_gather(ops.table, value, 0, groups)
    return folded(ops.table, ops.reshape(joined, shape))


def own_part(ops: Ops, value: Value, groups: Groups, shape: tuple[int, ...]) -> Value:
    """Each member's part of a tensor, cut in memory order."""
    if not shape or not value.shape or value.shape[0] != shape[0] * groups.size:
        value = ops.reshape(value, [ops.size(ops.reshape(value, [_count(value)]), 0)])
    part = collective.own_part(ops.table, value, 0, groups)
    return folded(ops.table, ops.reshape(part, shape))


def _count(value: Value) -> int:
    count = 1
    for size in value.shape:
        count *= int(size)
    return count


def exchanged(ops: Ops, value: Value, groups: Groups) -> Value:
    """The members' tensors cut into equal parts, of which each member gets one from each."""
    return folded(ops.table, collective.all_to_all(ops.table, value, groups))


# ---------------------------------------------------------------------- the largest and the smallest
def _extreme(ops: Ops, value: Value, groups: Groups, name: str) -> Value:
    turned = value if name == "maximum" else ops.neg(value)  # the smallest is described as minus the largest of -x
    if len(turned.terms) == 1:
        joined = _joined_maximum(ops.table, turned.terms[0], groups)
        if joined is not None:
            largest = Value(value.shape, (joined,))
            return largest if name == "maximum" else ops.neg(largest)
    members = [taken(ops.table, value, lanes) for lanes in groups.each(ops.table)]
    if name == "maximum":  # of which minus infinity is no part, if there is another one
        members = [each for each in members if not ops.is_minus_infinity(each)] or members[:1]
    different = [each for n, each in enumerate(members) if not any(same(each, other) for other in members[:n])]
    return members[0] if len(different) == 1 else apply(ops.table, name, different)


def _joined_maximum(table: Table, term: Term, groups: Groups) -> Term | None:
    """The largest over neighbouring ranges is the largest over all of them."""
    if len(term.factors) != 1 or term.factors[0].atom.kind != "max" or term.factors[0].power != 1 or term.coefficient != 1:
        return None
    (factor,) = term.factors
    definition = table.definitions[factor.atom]
    (product,) = definition.operands[0]
    moving = {-1 - axis for axis, index in enumerate(factor.at) if not _alike(index, groups)}
    if len(moving) != 1 or not _uniform(term, groups):
        return None
    product = _ranged(product, *moving)
    along = next((v for v in range(len(product.extents)) if _moves_with(product, v, *moving)), None)
    if along is None:
        return None
    size = product.extents[along]
    at = []
    for index in factor.at:
        if _alike(index, groups):
            at.append(index)
            continue
        held = np.sort(np.broadcast_to(np.asarray(index.offset), groups.group.shape)[groups.members], axis=1)
        if not (np.diff(held, axis=1) == size).all():
            return None
        at.append(Index(index.terms, collapse(held[:, 0][groups.group])))
    names: dict[int, Index] = {-1 - axis: index for axis, index in enumerate(at)}
    bound = {v: next(table.names) for v in range(len(product.extents))}
    spans = {bound[v]: (0, extent * (groups.size if v == along else 1)) for v, extent in enumerate(product.extents)}
    names |= {v: Index(((name, 1),)) for v, name in bound.items()}
    part = Part(product.label, substitute(product.factors, names), tuple(bound.values()))
    atom, axes = table.define("max", "max", definition.parameters, 1, [part], {**term.ranges, **spans})
    return table.settle(term.with_(factors=(Factor(atom, axes),)))


def _ranged(product: Product, axis: int) -> Product:
    """The product with a range of one element at an axis, if there is no range yet."""
    places = [index for factor in product.factors for index in factor.at if axis in dict(index.terms)]
    if any(len(index.terms) > 1 for index in places):
        return product
    new = {axis: Index(((axis, 1), (len(product.extents), 1)))}
    return Product(product.label, substitute(product.factors, new), (*product.extents, 1))


def _moves_with(product: Product, variable: int, axis: int) -> bool:
    """Whether to move an axis is to move a range: each position has both, side by side, or neither."""
    indices = [dict(index.terms) for factor in product.factors for index in factor.at]
    return all((index.get(variable) == index.get(axis) == 1) or not {variable, axis} & index.keys() for index in indices)


def _uniform(term: Term, groups: Groups) -> bool:
    numbers = [bound for span in [*term.box, *term.ranges.values()] for bound in span] + [term.weight]
    return all(_alike(Index((), number), groups) for number in numbers)


def _alike(index: Index, groups: Groups) -> bool:
    if not isinstance(index.offset, np.ndarray):
        return True
    held = index.offset[groups.members]
    return bool((held == held[:, :1]).all())
