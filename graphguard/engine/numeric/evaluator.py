"""The meaning of descriptions, in numbers. Independent of how the engine finds them: it shares the definitions alone.

What has no meaning in numbers here (an operator without a lemma, a part of an input, memory that nothing was written to) is
learned: the first tensor that is described as such an atom says what it holds, and every later one must agree.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from graphguard.engine.numeric.functions import FUNCTIONS, whole
from graphguard.engine.store.table import Table
from graphguard.engine.terms.definition import Definition, Product
from graphguard.engine.terms.lane import at_lane
from graphguard.engine.terms.term import Atom, Factor, Index, Term, Value

Array = np.ndarray[Any, Any]
MOST_ELEMENTS = 1 << 22
MANY_AXES = 12  # of which most have one element; numpy has no more than 32
FEW_ELEMENTS = 1 << 14  # below, a product is faster than a plan for it
OUTSIDE = 0.7310585786300049  # read where a tensor has no element: nothing that is right depends on it


class TooLarge(Exception):
    """A description that would take too much memory to evaluate, or numbers beyond those of a computer on the way."""


class Unlearned(Exception):
    """A description of what is known by name alone."""


class Malformed(Exception):
    """A description that means nothing: a box outside of its tensor, or a term that does not fill its box."""


# For each position of an atom: which earlier one it goes along with, at which distance.
_Links = tuple[tuple[int | None, int], ...]


class _Box(NamedTuple):
    """An atom on a box: where it begins, and its elements. `known` says which of them are, if not all."""

    corner: tuple[int, ...]
    elements: Array
    known: Array | None = None

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(c + s for c, s in zip(self.corner, self.elements.shape, strict=True))

    def holds(self, low: Sequence[int], high: Sequence[int]) -> bool:
        return all(c <= a for c, a in zip(self.corner, low, strict=True)) and all(
            b <= e for b, e in zip(high, self.end, strict=True)
        )

    def places(self, positions: Sequence[Array]) -> tuple[Array, ...]:
        return tuple(p - c for p, c in zip(positions, self.corner, strict=True))


class Evaluator:
    """Evaluates descriptions in one lane after the other, on given inputs."""

    def __init__(self, table: Table, inputs: Mapping[str, Array], constants: Mapping[Any, Array] | None = None):
        self._table, self._inputs, self._constants = table, inputs, constants or {}
        self._names = {atom.id: key for (_, key), atom in table.atoms()}
        self._boxes: dict[tuple[int, _Links], _Box] = {}  # atoms that were evaluated, by how their positions go together
        self._learnt: dict[int, _Box] = {}
        self._lists: dict[Any, Array] = {}  # of each atom at certain positions
        self._underflowed = False  # some exponential was rounded to zero

    def value(self, value: Value, lane: int = 0) -> Array:
        """What the lane holds: its terms, added up."""
        shape = [at_lane(size, lane) for size in value.shape]
        total = np.zeros(shape)
        for term in value.terms:
            if at_lane(term.weight, lane):
                box = [(at_lane(low, lane), at_lane(high, lane)) for low, high in term.box]
                if len(box) != len(shape) or any(not 0 <= a <= b <= size for (a, b), size in zip(box, shape, strict=True)):
                    raise Malformed(f"a term on {box} of a tensor of {shape}")
                elements = self.term(term, lane)
                if elements.shape != tuple(b - a for a, b in box):
                    raise Malformed(f"a term of {elements.shape} on {box}")
                total[tuple(slice(a, b) for a, b in box)] += elements
        return total

    def term(self, term: Term, lane: int = 0) -> Array:
        """The product over a grid of all variables, some of them summed, the others grouped into dims."""
        visible = [variable for dim in term.dims for variable in dim]
        spans = {v: (at_lane(low, lane), at_lane(high, lane)) for v, (low, high) in term.ranges.items()}
        order = [*visible, *(v for v in spans if v not in visible)]
        sizes = [max(0, spans[v][1] - spans[v][0]) for v in order]
        grid = _grid({v: np.arange(*spans[v]) for v in order})
        total = _contracted(self._elements(term.factors, grid, lane), sizes, len(visible))
        shape = [math.prod(spans[v][1] - spans[v][0] for v in dim) for dim in term.dims]
        return float(term.coefficient) * at_lane(term.weight, lane) * np.reshape(total, shape)

    def _elements(self, factors: Sequence[Factor], grid: Mapping[int, Array], lane: int) -> list[Array]:
        """Each factor's elements over the grid, of size 1 along what it does not mention."""
        result = []
        for factor in factors:
            elements = self.atom(factor.atom, [_position(index, grid, lane) for index in factor.at])
            if factor.power < 0 and self._underflowed and (elements == 0).any():
                raise TooLarge("divided by what is too small")
            if factor.power != 1:
                with np.errstate(all="ignore"):
                    base, elements = elements, np.power(elements, float(factor.power))
                self._note_overflow(np.where(base == 0, np.inf, base), elements)
            result.append(elements)
        return result

    # ------------------------------------------------------------------ atoms
    def atom(self, atom: Atom, positions: list[Array]) -> Array:
        """An atom's elements at the given positions."""
        match atom.kind:
            case "idx":
                return np.asarray(positions[0], dtype=float)
            case "impulse":
                return np.asarray(positions[0] == 0, dtype=float)
            case "step" | "window":
                return np.asarray(positions[0] > 0, dtype=float)
            case "number":
                return np.asarray(float(self._names[atom.id]))  # type: ignore[arg-type]
            case "dims":
                return np.ones(np.broadcast_shapes(*(p.shape for p in positions)))
            case "input":
                return _read(self._inputs[self._names[atom.id]], positions)  # type: ignore[index]
            case "constant":
                return _read(self._constants[self._names[atom.id]], positions)
        shape = np.broadcast_shapes(*(p.shape for p in positions))
        if len(shape) > MANY_AXES:
            kept = [axis for axis, size in enumerate(shape) if size != 1]
            narrow = [np.reshape(p, [((1,) * len(shape) + p.shape)[axis - len(shape)] for axis in kept]) for p in positions]
            found = self._found(atom, narrow)
            return np.reshape(np.broadcast_to(found, [shape[axis] for axis in kept]), shape)
        return self._found(atom, positions)

    def _found(self, atom: Atom, positions: list[Array]) -> Array:
        return self._boxed(atom, positions) if self._has_meaning(atom) else self._learned(atom, positions)

    def _has_meaning(self, atom: Atom) -> bool:
        if atom.kind == "function":
            return self._table.definitions[atom].name in FUNCTIONS
        return atom.kind in ("sum", "lin", "delta", "max")

    def _boxed(self, atom: Atom, positions: list[Array]) -> Array:
        """Evaluate a defined atom on a box around all positions asked for so far, and read it there."""
        if not positions or any(p.size == 0 for p in positions):
            return self._defined(atom, positions)
        linked = _links(positions)
        free = [p for p, (leader, _) in zip(positions, linked, strict=True) if leader is None]
        low, high = _hull(free)
        box = self._boxes.get((atom.id, linked))
        if box is None or not box.holds(low, high):
            asked = math.prod(np.broadcast_shapes(*(p.shape for p in free)))
            if box is not None:
                low, high = _join(low, high, box)
                asked += box.elements.size
            sizes = [b - a for a, b in zip(low, high, strict=True)]
            if math.prod(sizes) > min(4 * asked, MOST_ELEMENTS):
                return self._exact(atom, positions)
            grid = iter(_grid({n: np.arange(a, b) for n, (a, b) in enumerate(zip(low, high, strict=True))}).values())
            whole: list[Array] = []
            for leader, distance in linked:
                whole.append(next(grid) if leader is None else whole[leader] + distance)
            box = self._boxes[atom.id, linked] = _Box(tuple(low), np.broadcast_to(self._defined(atom, whole), sizes))
        return np.asarray(box.elements[box.places(free)])

    def _exact(self, atom: Atom, positions: list[Array]) -> Array:
        """An atom at positions that are few among those around them, as on a diagonal."""
        key = (atom.id, *((p.shape, p.tobytes()) for p in positions))
        known = self._lists.get(key)
        if known is None:
            known = self._lists[key] = self._defined(atom, positions)
        return known

    def _defined(self, atom: Atom, positions: list[Array]) -> Array:
        definition = self._table.definitions[atom]
        match atom.kind:
            case "sum" | "lin":
                return self._operand(definition.operands[0], positions)
            case "delta":
                return np.asarray(whole(self._operand(definition.operands[0], positions[:-1])) == positions[-1], dtype=float)
            case "max":
                return self._maximum(definition, positions)
        operands = [self._operand(operand, positions) for operand in definition.operands]
        with np.errstate(all="ignore"):
            if definition.name in ("maximum", "minimum"):  # of any number of tensors
                return np.asarray(functools.reduce(FUNCTIONS[definition.name], operands), dtype=float)
            found = np.asarray(FUNCTIONS[definition.name](*operands, *definition.parameters), dtype=float)
        if definition.name in ("exp", "exp2"):
            self._note_overflow(operands[0], found)
        return found

    def _note_overflow(self, given: Array, found: Array) -> None:
        """A quotient of exponentials has a value where each of them, or a power of it, has none."""
        finite = np.isfinite(given)
        if (finite & np.isinf(found)).any():
            raise TooLarge("an exponential")
        self._underflowed |= bool((finite & (found == 0)).any())

    def _operand(self, products: tuple[Product, ...], positions: list[Array]) -> Array:
        total: Array = np.zeros(())
        for product in products:
            elements, sizes = self._over_bound(product, positions)
            summed = _contracted(elements, [*sizes, *product.extents], len(sizes))
            total = total + float(product.label[1]) * summed  # type: ignore[index]
        return total

    def _maximum(self, definition: Definition, positions: list[Array]) -> Array:
        (product,) = definition.operands[0]
        elements, sizes = self._over_bound(product, positions)
        whole = [*sizes, *product.extents]
        _checked(whole)
        found: Array = np.ones(())
        for each in elements:
            found = found * each
        scaled = float(product.label[1]) * np.broadcast_to(found, whole)  # type: ignore[index]
        return np.asarray(scaled.max(axis=tuple(range(len(sizes), len(whole)))))

    def _over_bound(self, product: Product, positions: list[Array]) -> tuple[list[Array], list[int]]:
        """A product's factors at the positions, with one more axis for each bound variable; the sizes of the other axes."""
        bound = len(product.extents)
        outer = list(np.broadcast_shapes(*(p.shape for p in positions)))
        grid: dict[int, Array] = {}
        for number, position in enumerate(positions):
            grid[-1 - number] = np.reshape(position, np.shape(position) + (1,) * bound)
        for number, size in enumerate(product.extents):
            grid[number] = np.arange(size).reshape([-1 if n == number else 1 for n in range(bound)])
        return self._elements(product.factors, grid, 0), outer

    # ------------------------------------------------------------------ what is known from tensors alone
    def learn(self, value: Value, lane: int, elements: Array) -> None:
        """Take what a tensor holds for the meaning of the atom that describes it, where the atom has no other meaning."""
        if len(value.terms) != 1 or len(value.terms[0].factors) != 1:
            return
        (term,) = value.terms
        (factor,) = term.factors
        scale = float(term.coefficient) * at_lane(term.weight, lane)
        if (
            factor.atom.kind in ("input", "constant", "unwritten", "draw")
            or factor.atom.id < len(_BUILT_IN)
            or self._has_meaning(factor.atom)
        ):
            return
        if factor.power != 1 or not scale or term.summed or not elements.size:
            return
        box = tuple(slice(at_lane(low, lane), at_lane(high, lane)) for low, high in term.box)
        spans = {v: (at_lane(low, lane), at_lane(high, lane)) for v, (low, high) in term.ranges.items()}
        order = [variable for dim in term.dims for variable in dim]
        grid = _grid({v: np.arange(*spans[v]) for v in order})
        positions = [_position(index, grid, lane) for index in factor.at]
        sizes = [spans[v][1] - spans[v][0] for v in order]
        if math.prod(sizes) != elements[box].size:
            return  # it is malformed, which is said where it is evaluated
        self._note(factor.atom, [np.broadcast_to(p, sizes) for p in positions], np.reshape(elements[box] / scale, sizes))

    def _note(self, atom: Atom, positions: list[Array], elements: Array) -> None:
        if not positions:  # one number, which all elements are
            elements = elements.reshape(-1)[0]
        low, high = _hull(positions)
        box = self._learnt.get(atom.id)
        if box is None or not box.holds(low, high):
            if box is not None:
                low, high = _join(low, high, box)
            sizes = [b - a for a, b in zip(low, high, strict=True)]
            _checked(sizes)
            wider = _Box(tuple(low), np.zeros(sizes), np.zeros(sizes, dtype=bool))
            if box is not None and box.known is not None:
                inside = tuple(slice(c - a, e - a) for c, e, a in zip(box.corner, box.end, low, strict=True))
                wider.elements[inside], wider.known[inside] = box.elements, box.known  # type: ignore[index]
            box = self._learnt[atom.id] = wider
        assert box.known is not None
        places = box.places(positions)
        box.elements[places] = np.where(box.known[places], box.elements[places], elements)
        box.known[places] = True

    def _learned(self, atom: Atom, positions: list[Array]) -> Array:
        box = self._learnt.get(atom.id)
        if box is None or box.known is None or not box.holds(*_hull(positions)):
            raise Unlearned(self._called(atom))
        places = box.places(positions)
        if not box.known[places].all():
            raise Unlearned(self._called(atom))
        return np.asarray(box.elements[places])

    def _called(self, atom: Atom) -> str:
        definition = self._table.definitions.get(atom)
        return atom.kind if definition is None else definition.name


_BUILT_IN = range(8)


def _contracted(factors: Sequence[Array], sizes: Sequence[int], kept: int) -> Array:
    """The product of arrays that broadcast to the sizes, summed over all axes but the first ones."""
    _checked(sizes[:kept])
    with np.errstate(all="ignore"):
        infinite = not all(np.isfinite(factor).all() for factor in factors)
        if math.prod(sizes) <= (MOST_ELEMENTS if infinite else FEW_ELEMENTS):
            product: Array = np.ones((1,) * len(sizes))
            for factor in factors:
                product = np.where((product == 0) | (factor == 0), 0.0, product * factor) if infinite else product * factor
            total = np.asarray(np.broadcast_to(product, list(sizes)).sum(axis=tuple(range(kept, len(sizes)))))
        else:
            total = _einsum(factors, sizes, kept)
    if not infinite and not np.isfinite(total).all():
        raise TooLarge("a product")
    return total


def _einsum(factors: Sequence[Array], sizes: Sequence[int], kept: int) -> Array:
    """The summed axes are eliminated one by one, the one that makes the smallest product first."""
    count = len(sizes)
    left = [np.reshape(factor, (1,) * (count - factor.ndim) + factor.shape) for factor in factors]
    summed = {axis for axis in range(kept, count) if any(factor.shape[axis] != 1 for factor in left)}
    repeated = math.prod(sizes[axis] for axis in range(kept, count) if axis not in summed)
    while summed:
        shapes = {axis: np.broadcast_shapes(*(f.shape for f in left if f.shape[axis] != 1)) for axis in summed}
        axis = min(summed, key=lambda each: math.prod(shapes[each]))
        summed.remove(axis)
        inside = sorted((f for f in left if f.shape[axis] != 1), key=lambda factor: factor.size)
        left = [f for f in left if f.shape[axis] == 1] + [_summed_product(inside, axis)]
    total: Array = np.ones((1,) * count)
    for factor in sorted(left, key=lambda each: each.size):
        total = total * factor
    return np.broadcast_to(np.reshape(total * repeated, total.shape[:kept]), list(sizes[:kept]))


def _summed_product(factors: Sequence[Array], axis: int) -> Array:
    """The product of arrays, summed over one axis, which stays with one element."""
    *others, last = factors
    if not others:
        return np.asarray(last.sum(axis=axis, keepdims=True))
    first = functools.reduce(np.multiply, others)
    shape = list(np.broadcast_shapes(first.shape, last.shape))
    shape[axis] = 1
    _checked(shape)
    operands: list[Any] = []
    for each in (first, last):
        axes = [number for number, size in enumerate(each.shape) if size != 1]
        operands += [np.reshape(each, [each.shape[number] for number in axes]), axes]
    return np.reshape(np.einsum(*operands, [number for number, size in enumerate(shape) if size != 1]), shape)


def _read(array: Array, positions: list[Array]) -> Array:
    """Elements of a tensor. A position outside is not one of another element, as it would be for numpy."""
    inside: Any = True
    for position, size in zip(positions, array.shape, strict=True):
        inside = inside & (position >= 0) & (position < size)
    if np.all(inside):
        return np.asarray(array[tuple(positions)], dtype=float)
    if not array.size:
        return np.full(np.shape(inside), OUTSIDE)
    within = tuple(np.clip(p, 0, size - 1) for p, size in zip(positions, array.shape, strict=True))
    return np.where(inside, np.asarray(array[within], dtype=float), OUTSIDE)


def _position(index: Index, grid: Mapping[int, Array], lane: int) -> Array:
    return sum((stride * grid[v] for v, stride in index.terms), start=np.asarray(at_lane(index.offset, lane)))


def _grid(axes: Mapping[int, Array]) -> dict[int, Array]:
    """Each variable's values along an axis of its own."""
    count = len(axes)
    return {
        v: values.reshape([-1 if axis == place else 1 for axis in range(count)])
        for place, (v, values) in enumerate(axes.items())
    }


def _links(positions: Sequence[Array]) -> _Links:
    """Positions that go along with earlier ones need no axis of their own: those of a diagonal, or of a window."""
    result: list[tuple[int | None, int]] = []
    for number, mine in enumerate(positions):
        found: tuple[int | None, int] = (None, 0)
        for leader, its in enumerate(positions[:number]):
            if mine.shape == its.shape and mine.size > 1 and result[leader][0] is None:
                distance = mine - its
                first = int(distance.flat[0])
                if (distance == first).all():
                    found = leader, first
                    break
        result.append(found)
    return tuple(result)


def _hull(positions: Sequence[Array]) -> tuple[list[int], list[int]]:
    return [int(p.min()) for p in positions], [int(p.max()) + 1 for p in positions]


def _join(low: Sequence[int], high: Sequence[int], box: _Box) -> tuple[list[int], list[int]]:
    return list(map(min, low, box.corner)), list(map(max, high, box.end))


def _checked(sizes: Sequence[int]) -> None:
    if math.prod(sizes) > 4 * MOST_ELEMENTS:
        raise TooLarge
