"""The meaning of descriptions, in numbers. Independent of how the engine finds them: it shares the definitions alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from graphguard.engine.lane import at_lane
from graphguard.engine.monomial import Atom, Factor, Monomial, Range, Variable
from graphguard.engine.table import Table
from graphguard.engine.value import Value

Array = np.ndarray[Any, Any]
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "relu": lambda x: np.maximum(x, 0),
    "exp": np.exp,
    "tanh": np.tanh,
    "maximum": np.maximum,
    "where_positive": lambda condition, x: np.where(condition > 0, x, 0),
    "clamp": np.clip,
}


class Evaluator:
    """Evaluates monomials in one lane, on given inputs."""

    def __init__(self, table: Table, inputs: Mapping[str, Array]):
        self._table, self._inputs = table, inputs

    def value(self, value: Value, lane: int = 0) -> Array:
        """What the lane holds: its placed monomials, added up."""
        total = np.zeros([at_lane(size, lane) for size in value.shape])
        for term in value.terms:
            box = tuple(slice(at_lane(low, lane), at_lane(high, lane)) for low, high in term.box)
            total[box] += self.local(term.monomial, lane)
        return total

    def local(self, monomial: Monomial, lane: int = 0) -> Array:
        """What the lane holds: the product over a grid of all variables, some of them summed, the others grouped into dims."""
        visible = [variable for dim in monomial.dims for variable in dim]
        spans = {v: (at_lane(low, lane), at_lane(high, lane)) for v, (low, high) in monomial.ranges.items()}
        summed = [v for v in spans if v not in visible]
        grid = _grid([*visible, *summed], spans)
        product = self._product(monomial.factors, grid, lane)
        full = np.broadcast_to(product, tuple(high - low for low, high in (spans[v] for v in [*visible, *summed])))
        total = full.sum(axis=tuple(range(len(visible), len(visible) + len(summed))))
        sizes = [int(np.prod([spans[v][1] - spans[v][0] for v in dim], dtype=int)) for dim in monomial.dims]
        return float(monomial.coefficient) * np.reshape(total, sizes)

    def _product(self, factors: tuple[Factor, ...], grid: Mapping[Variable, Array], lane: int) -> Array:
        product: Array = np.ones(())
        for factor in factors:
            positions = [
                sum((stride * grid[v] for v, stride in index.terms), start=np.asarray(at_lane(index.offset, lane)))
                for index in factor.at
            ]
            product = product * self.atom(factor.atom, positions, lane) ** float(factor.power)
        return product

    def atom(self, atom: Atom, positions: list[Array], lane: int) -> Array:
        """An atom's elements at the given positions."""
        match atom.kind:
            case "input":
                name: str = atom.definition[0]  # type: ignore[index]
                return np.asarray(self._inputs[name][tuple(positions)])
            case "sum":
                factors, summed, free = self._table.sums[atom.id]
                return self._total(factors, summed, dict(zip(free, positions, strict=True)), lane)
            case "function":
                return self._function(atom, positions, lane)
        raise ValueError(f"an atom of kind {atom.kind!r} has no meaning here")

    def _total(
        self, factors: tuple[Factor, ...], summed: Mapping[Variable, Range], free: Mapping[Variable, Array], lane: int
    ) -> Array:
        """A product, summed over some variables, at given positions of the others."""
        outer = np.broadcast_shapes(*(np.shape(position) for position in free.values()))
        spans = {v: (at_lane(low, lane), at_lane(high, lane)) for v, (low, high) in summed.items()}
        grid = _grid(list(spans), spans)
        for variable, position in free.items():
            grid[variable] = np.reshape(np.broadcast_to(position, outer), outer + (1,) * len(spans))
        inner = tuple(high - low for low, high in spans.values())
        product = np.broadcast_to(self._product(factors, grid, lane), outer + inner)
        return np.asarray(product.sum(axis=tuple(range(len(outer), len(outer) + len(inner)))))

    def _function(self, atom: Atom, positions: list[Array], lane: int) -> Array:
        function = self._table.functions[atom.id]
        free = dict(zip(function.free, positions, strict=True))
        operands = []
        for operand in function.operands:
            total: Array = np.zeros(np.broadcast_shapes(*(np.shape(position) for position in positions)))
            for coefficient, factors, summed in operand:
                total = total + float(coefficient) * self._total(factors, dict(summed), free, lane)
            operands.append(total)
        return np.asarray(FUNCTIONS[function.name](*operands, *function.parameters))


def _grid(variables: list[Variable], spans: Mapping[Variable, tuple[int, int]]) -> dict[Variable, Array]:
    """Each variable's values along an axis of its own."""
    count = len(variables)
    return {
        v: np.arange(*spans[v]).reshape([-1 if axis == place else 1 for axis in range(count)])
        for place, v in enumerate(variables)
    }
