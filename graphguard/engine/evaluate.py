"""The meaning of descriptions, in numbers. Independent of how the engine finds them: it shares the definitions alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from graphguard.engine.definition import Definition, Product
from graphguard.engine.lane import at_lane
from graphguard.engine.meaning import FUNCTIONS, OPERATORS
from graphguard.engine.table import Table
from graphguard.engine.term import Atom, Factor, Index, Term, Value

Array = np.ndarray[Any, Any]
MOST_ELEMENTS = 1 << 24


class TooLarge(Exception):
    """A description that would take too much memory to evaluate."""


class Evaluator:
    """Evaluates descriptions in one lane after the other, on given inputs."""

    def __init__(self, table: Table, inputs: Mapping[str, Array], constants: Mapping[Any, Array] | None = None):
        self._table, self._inputs, self._constants = table, inputs, constants or {}
        self._names = {atom.id: key for (_, key), atom in table.atoms()}
        self._boxes: dict[int, tuple[tuple[int, ...], Array]] = {}  # atoms already evaluated on a box: its corner, its elements

    def value(self, value: Value, lane: int = 0) -> Array:
        """What the lane holds: its terms, added up."""
        total = np.zeros([at_lane(size, lane) for size in value.shape])
        for term in value.terms:
            if at_lane(term.weight, lane):
                box = tuple(slice(at_lane(low, lane), at_lane(high, lane)) for low, high in term.box)
                total[box] += self.term(term, lane)
        return total

    def term(self, term: Term, lane: int = 0) -> Array:
        """The product over a grid of all variables, some of them summed, the others grouped into dims."""
        visible = [variable for dim in term.dims for variable in dim]
        spans = {v: (at_lane(low, lane), at_lane(high, lane)) for v, (low, high) in term.ranges.items()}
        order = [*visible, *(v for v in spans if v not in visible)]
        sizes = [max(0, spans[v][1] - spans[v][0]) for v in order]
        grid = _grid({v: np.arange(*spans[v]) for v in order})
        product = np.broadcast_to(self._product(term.factors, grid, lane), _checked(sizes))
        total = product.sum(axis=tuple(range(len(visible), len(order))))
        shape = [int(np.prod([spans[v][1] - spans[v][0] for v in dim], dtype=int)) for dim in term.dims]
        return float(term.coefficient) * at_lane(term.weight, lane) * np.reshape(total, shape)

    def _product(self, factors: tuple[Factor, ...], grid: Mapping[int, Array], lane: int) -> Array:
        product: Array = np.ones(())
        for factor in factors:
            elements = self.atom(factor.atom, [_position(index, grid, lane) for index in factor.at])
            product = product * (elements if factor.power == 1 else elements ** float(factor.power))
        return product

    def atom(self, atom: Atom, positions: list[Array]) -> Array:
        """An atom's elements at the given positions."""
        match atom.kind:
            case "idx":
                return np.asarray(positions[0], dtype=float)
            case "impulse":
                return np.asarray(positions[0] == 0, dtype=float)
            case "step":
                return np.asarray(positions[0] > 0, dtype=float)
            case "dims":
                return np.ones(np.broadcast_shapes(*(p.shape for p in positions)))
            case "input":
                return np.asarray(self._inputs[self._names[atom.id]][tuple(positions)], dtype=float)
            case "constant":
                return np.asarray(self._constants[self._names[atom.id]][tuple(positions)], dtype=float)
            case "op":
                return self._operator(atom, positions)
        return self._boxed(atom, positions)

    def _boxed(self, atom: Atom, positions: list[Array]) -> Array:
        """Evaluate a defined atom on the box around all positions asked for, once, and read it there."""
        if not positions:
            return self._defined(atom, [])
        low = tuple(int(p.min(initial=0) if p.size == 0 else p.min()) for p in positions)
        high = tuple(int(p.max(initial=-1) if p.size == 0 else p.max()) + 1 for p in positions)
        known = self._boxes.get(atom.id)
        if known is not None:
            corner, elements = known
            ends = tuple(c + s for c, s in zip(corner, elements.shape, strict=True))
            if all(a >= c for a, c in zip(low, corner, strict=True)) and all(b <= e for b, e in zip(high, ends, strict=True)):
                return np.asarray(elements[tuple(p - c for p, c in zip(positions, corner, strict=True))])
        asked = np.broadcast_shapes(*(p.shape for p in positions))
        sizes = [b - a for a, b in zip(low, high, strict=True)]
        if np.prod(sizes, dtype=float) > 4 * max(1, int(np.prod(asked))) or np.prod(sizes, dtype=float) > MOST_ELEMENTS:
            return self._defined(atom, positions)
        grid = _grid({n: np.arange(a, b) for n, (a, b) in enumerate(zip(low, high, strict=True))})
        elements = np.broadcast_to(self._defined(atom, [grid[n] for n in range(len(low))]), sizes)
        self._boxes[atom.id] = low, np.asarray(elements)
        return np.asarray(elements[tuple(p - c for p, c in zip(positions, low, strict=True))])

    def _defined(self, atom: Atom, positions: list[Array]) -> Array:
        definition = self._table.definitions[atom.id]
        match atom.kind:
            case "sum" | "lin":
                return self._operand(definition.operands[0], positions)
            case "delta":
                return np.asarray(self._operand(definition.operands[0], positions[:-1]) == positions[-1], dtype=float)
            case "max":
                return self._maximum(definition, positions)
        operands = [self._operand(operand, positions) for operand in definition.operands]
        with np.errstate(all="ignore"):
            return np.asarray(FUNCTIONS[definition.name](*operands, *definition.parameters), dtype=float)

    def _operand(self, products: tuple[Product, ...], positions: list[Array]) -> Array:
        total: Array = np.zeros(())
        for product in products:
            elements, bound = self._expanded(product, positions)
            total = total + float(product.label[1]) * elements.sum(axis=tuple(range(elements.ndim - bound, elements.ndim)))  # type: ignore[index]
        return total

    def _maximum(self, definition: Definition, positions: list[Array]) -> Array:
        (product,) = definition.operands[0]
        elements, bound = self._expanded(product, positions)
        scaled = float(product.label[1]) * elements  # type: ignore[index]
        return np.asarray(scaled.max(axis=tuple(range(elements.ndim - bound, elements.ndim))))

    def _expanded(self, product: Product, positions: list[Array]) -> tuple[Array, int]:
        """A product at the positions, with one more axis for each bound variable."""
        bound = len(product.extents)
        outer = np.broadcast_shapes(*(p.shape for p in positions)) if positions else ()
        grid: dict[int, Array] = {}
        for number, position in enumerate(positions):
            grid[-1 - number] = np.reshape(position, np.shape(position) + (1,) * bound)
        for number, size in enumerate(product.extents):
            grid[number] = np.arange(size).reshape([-1 if n == number else 1 for n in range(bound)])
        shape = _checked([*outer, *product.extents])
        return np.broadcast_to(self._product(product.factors, grid, 0), shape), bound

    def _operator(self, atom: Atom, positions: list[Array]) -> Array:
        """An operator on whole rows: the last positions are those of its own dims, the others say which row."""
        definition = self._table.definitions[atom.id]
        results: int = definition.parameters[0]  # type: ignore[assignment]
        rows, own = positions[: len(positions) - results], positions[len(positions) - results :]
        low = [int(p.min()) for p in rows]
        grid = _grid({n: np.arange(a, int(p.max()) + 1) for n, (a, p) in enumerate(zip(low, rows, strict=True))})
        operands = []
        for products in definition.operands:
            total: Any = 0.0
            for product in products:
                elements, _ = self._expanded(product, [grid[n] for n in range(len(rows))])
                total = total + float(product.label[1]) * elements  # type: ignore[index]
            sizes = definition.parameters[1][len(operands)]  # type: ignore[index]
            lead = np.shape(total)[: len(rows)] or (1,) * len(rows)
            operands.append(np.reshape(total, (*lead, *sizes)) if products else np.zeros((1,) * len(rows) + tuple(sizes)))
        whole = np.asarray(OPERATORS[definition.name](definition.parameters[2:], *operands), dtype=float)
        return np.asarray(whole[(*(p - a for p, a in zip(rows, low, strict=True)), *own)])


def _position(index: Index, grid: Mapping[int, Array], lane: int) -> Array:
    return sum((stride * grid[v] for v, stride in index.terms), start=np.asarray(at_lane(index.offset, lane)))


def _grid(axes: Mapping[int, Array]) -> dict[int, Array]:
    """Each variable's values along an axis of its own."""
    count = len(axes)
    return {
        v: values.reshape([-1 if axis == place else 1 for axis in range(count)])
        for place, (v, values) in enumerate(axes.items())
    }


def _checked(sizes: list[int]) -> tuple[int, ...]:
    if np.prod(sizes, dtype=float) > 8 * MOST_ELEMENTS:
        raise TooLarge
    return tuple(sizes)
