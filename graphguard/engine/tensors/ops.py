"""The vocabulary in which lemmas are written: tensor operations on descriptions, with torch's broadcasting.

The sequential run makes an atom of every sum of several products before it multiplies it or passes it to a function; the ranks'
runs look for those atoms instead. Both go through here, so both see values in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from itertools import pairwise
from math import prod

from graphguard.engine.algebra import function, logistic
from graphguard.engine.algebra.finite import is_nothing, may_be_masked, some_left
from graphguard.engine.algebra.grid import by_cell, covers
from graphguard.engine.algebra.infinities import FINITE, has_garbage, has_infinities, is_log_of_nothing
from graphguard.engine.algebra.partial_fractions import in_shares
from graphguard.engine.algebra.partial_sums import together
from graphguard.engine.algebra.product import Layout, constant, multiply
from graphguard.engine.algebra.sums import folded, named, plain
from graphguard.engine.algebra.value import add, concat, cut, permute, scale
from graphguard.engine.store.need import DEFINED
from graphguard.engine.store.table import Table
from graphguard.engine.tensors import integer
from graphguard.engine.tensors.one_piece import edges_of, in_one_piece
from graphguard.engine.tensors.shape import expand, reshape
from graphguard.engine.terms.definition import Part
from graphguard.engine.terms.lane import Lane, at_lane, collapse, equal, everywhere, varies
from graphguard.engine.terms.rational import Irrational, irrational, rational
from graphguard.engine.terms.term import (
    DIMS,
    IDX,
    ONE,
    STEP,
    WINDOW,
    Factor,
    Index,
    Range,
    Term,
    Undescribed,
    Value,
    Variable,
    bounds,
    weighted,
)

LABELS = "abcdefghijklmnopqrstuvwxyz"
Number = int | float | bool | Fraction
MINUS_INFINITY = float("-inf")
AMONG = frozenset({"cummax", "cummin", "kthvalue", "median", "mode", "sort", "topk"})  # whose results are among the elements


def fraction(number: Number) -> Fraction:
    if isinstance(number, Fraction):
        return number
    try:
        return rational(number)
    except ValueError as error:
        raise Undescribed(str(error)) from None


def _reading_order(factors: Sequence[Factor]) -> Callable[[Variable], tuple[int, int]]:
    """Variables by the first position that they occur in, and there by their strides."""
    found: dict[Variable, tuple[int, int]] = {}
    for place, index in enumerate(index for factor in factors for index in factor.at):
        for variable, stride in index.terms:
            found.setdefault(variable, (place, -abs(stride)))
    return lambda variable: found.get(variable, (-1, 0))


def _ascends(value: Value, dim: int) -> bool:
    """Whether a tensor is one piece along a dim, read forwards."""
    return all(
        equal(term.box[dim][0], 0)
        and equal(term.box[dim][1], value.shape[dim])
        and all(s > 0 for f in term.factors for i in f.at for v, s in i.terms if v in term.dims[dim])
        for term in value.terms
    )


def _read_at(term: Term) -> tuple[tuple[int, ...], ...]:
    """Which elements of which atoms a term begins with, in the first lane."""
    return tuple(
        (f.atom.id, *(at_lane(low, 0) for low, _ in (bounds(index, term.ranges) for index in f.at))) for f in term.factors
    )


def _is_solid(value: Value) -> bool:
    """Whether a tensor is one term everywhere, of which no mask takes something away."""
    return len(value.terms) == 1 and all(
        covers(term.box, value.shape)
        and not varies(term.weight)
        and not any(f.atom.indicator or f.atom is IDX for f in term.factors)
        for term in value.terms
    )


class Ops:
    def __init__(self, table: Table):
        self.table = table

    # ------------------------------------------------------------------ making tensors
    def full(self, shape: Sequence[Lane], number: Number | Lane) -> Value:
        if isinstance(number, float) and number == MINUS_INFINITY:
            return self.fn("log", self.zeros(shape))
        if not isinstance(number, (int, float, bool, Fraction)):
            return constant(shape, ONE, self.table, weight=number)
        found = irrational(abs(number)) if isinstance(number, float) else None
        if found is not None:
            return self._times(constant(shape, ONE if number > 0 else -ONE, self.table), found)
        return constant(shape, fraction(number), self.table)

    def zeros(self, shape: Sequence[Lane]) -> Value:
        return Value(tuple(shape), ())

    def ones(self, shape: Sequence[Lane]) -> Value:
        return self.full(shape, 1)

    def arange(self, size: int, start: Lane = 0) -> Value:
        variable = next(self.table.names)
        span = (start, collapse(start + size))
        term = Term(ONE, (Factor(IDX, (Index(((variable, 1),)),)),), {variable: span}, ((variable,),), ((0, size),))
        settled = self.table.settle(term)
        return Value((size,), () if settled is None else (settled,))

    # ------------------------------------------------------------------ arithmetic
    def broadcast(self, *values: Value) -> list[Value]:
        rank = max(len(value.shape) for value in values)
        shape: list[Lane] = [1] * rank
        for value in values:
            for dim, size in enumerate(value.shape, rank - len(value.shape)):
                if not equal(size, 1):
                    shape[dim] = size
        return [value if value.shape == tuple(shape) else expand(self.table, value, shape) for value in values]

    def add(self, *values: Value) -> Value:
        return integer.normalised(self.table, folded(self.table, add(self.table, self.broadcast(*values))))

    def scale(self, value: Value, number: Number) -> Value:
        if not number:
            self._require_numbers(value)
        found = irrational(abs(number)) if isinstance(number, float) else None
        if found is not None:
            return self._times(value if number > 0 else scale(value, -ONE), found)
        return integer.normalised(self.table, scale(value, fraction(number)))

    def _times(self, value: Value, number: Irrational) -> Value:
        rational, factors = self.table.root(number.number, Fraction(1, number.degree))
        if number.turns:
            factors = (*factors, Factor(self.table.pi(), (), Fraction(number.turns, number.degree)))
        terms = [term.with_(factors=(*term.factors, *factors)) for term in scale(value, rational).terms]
        return Value(value.shape, tuple(each for each in map(self.table.settle, terms) if each is not None))

    def neg(self, value: Value) -> Value:
        return self.scale(value, -1)

    def sub(self, a: Value, b: Value) -> Value:
        return self.add(a, self.neg(b))

    def mul(self, a: Value, b: Value) -> Value:
        number = function.is_constant(b)
        if number is not None and len(b.shape) <= len(a.shape) and all(equal(s, 1) for s in b.shape):
            return self.scale(a, number)
        a, b = self.broadcast(a, b)
        labels = LABELS[: len(a.shape)]
        return self.einsum([labels, labels], labels, a, b)

    def div(self, a: Value, b: Value) -> Value:
        return self.mul(a, self.power(b, -1))

    def einsum(self, labels: Sequence[str], result: str, *values: Value) -> Value:
        """Products over labelled dims; labels that the result does not have are summed."""
        if len(values) > 1:
            self._require_numbers(*values)
        return self.selected(labels, result, *values)

    def _require_numbers(self, *values: Value) -> None:
        """Zero times infinity is nothing: what the ranks multiply must be finite. Unwritten memory may be multiplied with what
        leaves it there, and with nothing that may be zero by its place."""
        if self.table.recording:
            return
        if any(has_infinities(self.table, value) for value in values):
            raise Undescribed("a product with what may be minus infinity")
        garbage = [value for value in values if has_garbage(self.table, value)]
        if garbage and (len(values) < 2 or not all(_is_solid(value) for value in values if value is not garbage[0])):
            raise Undescribed("a product with memory that nothing was written to")

    def selected(self, labels: Sequence[str], result: str, *values: Value) -> Value:
        """As einsum, where a factor only says which elements of the other are taken: what is not taken may be infinite."""
        found = folded(self.table, multiply(self.table, [self.atomic(value) for value in values], labels, result))
        return found if self.table.recording else in_shares(self.table, found)

    def atomic(self, value: Value) -> Value:
        """The value as a factor: the sequential run makes an atom of a sum; other runs look for one, or for what it is part
        of."""
        if len(value.terms) < 2:
            return value
        return named(self.table, value) if self.table.recording else together(self.table, folded(self.table, value))

    def matmul(self, a: Value, b: Value) -> Value:
        """[..., m, k] times [..., k, n], leading dims alike."""
        lead = LABELS[: len(a.shape) - 2]
        return self.einsum([f"{lead}xy", f"{lead}yz"], f"{lead}xz", a, b)

    def power(self, value: Value, exponent: Number) -> Value:
        found = logistic.reciprocal(self.table, value) if exponent == -1 and not self.table.recording else None
        return found or function.power(self.table, value, fraction(exponent))

    def exp(self, value: Value) -> Value:
        return function.exp(self.table, folded(self.table, value))

    def log(self, value: Value) -> Value:
        return function.log(self.table, value)

    def sigmoid(self, value: Value) -> Value:
        return logistic.sigmoid(self.table, value)

    def fn(self, name: str, *values: Value, parameters: tuple[Hashable, ...] = ()) -> Value:
        """An elementwise function that nothing more is known of."""
        return function.apply(self.table, name, self.broadcast(*values), parameters)

    # ------------------------------------------------------------------ reductions
    def sum(self, value: Value, dims: Sequence[int] | None = None, keep: bool = False) -> Value:
        gone = set(range(len(value.shape)) if dims is None else dims)
        labels = LABELS[: len(value.shape)]
        left = "".join(label for dim, label in enumerate(labels) if dim not in gone)
        total = folded(self.table, multiply(self.table, [value], [labels], left))
        if keep:
            return self.reshape(total, [1 if dim in gone else size for dim, size in enumerate(value.shape)])
        return total

    def mean(self, value: Value, dims: Sequence[int] | None = None, keep: bool = False) -> Value:
        count = 1
        for dim in range(len(value.shape)) if dims is None else dims:
            count *= self.size(value, dim)
        if not count:
            raise Undescribed("a mean of no elements")
        return self.scale(self.sum(value, dims, keep), Fraction(1, count))

    def max(self, value: Value, dims: Sequence[int], keep: bool = False) -> Value:
        """The largest element over dims: an atom that remembers the range, so that ranges of ranks can be joined."""
        value, gone = folded(self.table, value), set(dims)
        if all(everywhere(term.weight != 0) for term in value.terms):
            return self._max(value, dims, keep)
        left = [1 if dim in gone else size for dim, size in enumerate(value.shape) if keep or dim not in gone]
        return function.by_weight(self.table, [value], lambda each: self._max(each[0], dims, keep), left)

    def _max(self, value: Value, dims: Sequence[int], keep: bool) -> Value:
        gone = set(dims)
        if is_nothing(self.table, value):
            left = [1 if dim in gone else size for dim, size in enumerate(value.shape) if keep or dim not in gone]
            return self.full(left, MINUS_INFINITY)
        value = self._ascending(value, *gone) if len(gone) == 1 else value
        pieces = self._pieces(value, dims)
        if len(pieces) > 1:
            held = [piece for piece in pieces if not is_nothing(self.table, piece)] or pieces[:1]
            return functools.reduce(functools.partial(self.fn, "maximum"), [self._max(piece, dims, keep) for piece in held])
        parameters = FINITE if may_be_masked(self.table, value) and some_left(self.table, value, dims) else ()

        def on_cell(cells: list[list[Term]], box: tuple[Range, ...]) -> Term | None:
            term = plain(self.table, cells[0])
            if term is None:
                return None
            term = self._with_inner_maximum(term, max(gone)) if gone and not parameters else term
            term = self._in_one_dim(term, sorted(gone)) if len(gone) > 1 else term
            bound = tuple(v for dim in sorted(gone) for v in term.dims[dim])
            part = Part((0, term.coefficient), weighted(term), bound)
            atom, axes = self.table.define("max", "max", parameters, 1, [part], term.ranges)
            ranges = {v: span for v, span in term.ranges.items() if v not in bound}
            dims = tuple(() if dim in gone else group for dim, group in enumerate(term.dims))
            boxes = tuple((0, 1) if dim in gone else span for dim, span in enumerate(box))
            settled = self.table.settle(Term(ONE, (Factor(atom, axes),), ranges, dims, boxes))
            assert settled is not None
            return settled

        found = by_cell(self.table, [value], on_cell)
        shape = tuple(1 if dim in gone else size for dim, size in enumerate(value.shape))
        kept = Value(shape, found.terms)
        return kept if keep else self.reshape(kept, [size for dim, size in enumerate(shape) if dim not in gone])

    def _ascending(self, value: Value, dim: int) -> Value:
        """The same elements along a dim in the order in which they are read, so that they become one piece: the largest of
        them does not depend on their order."""
        size = value.shape[dim]
        if not isinstance(size, int) or _ascends(value, dim) or self.table.over("sorted_elements", size):
            return value
        elements = [self.cut(value, dim, place, place + 1) for place in range(size)]
        if any(len(element.terms) != 1 for element in elements):
            return value
        return folded(self.table, self.concat(sorted(elements, key=lambda element: _read_at(element.terms[0])), dim))

    def _with_inner_maximum(self, term: Term, dim: int) -> Term:
        """The largest of maxima is the largest of all that they are taken over: these are elements of the dim, too."""
        if len(term.factors) != 1 or term.factors[0].atom.kind != "max" or term.factors[0].power != 1:
            return term
        (factor,) = term.factors
        definition = self.table.definitions[factor.atom]
        if definition.parameters or len(definition.operands[0]) != 1 or term.coefficient != 1 or not equal(term.weight, 1):
            return term
        (product,) = definition.operands[0]
        names = {number: next(self.table.names) for number in range(len(product.extents))}
        at = {-1 - n: index for n, index in enumerate(factor.at)} | {n: Index(((v, 1),)) for n, v in names.items()}
        ranges = {**term.ranges, **{names[number]: (0, size) for number, size in enumerate(product.extents)}}
        factors = function.instance(product, at)
        group = sorted((*term.dims[dim], *names.values()), key=_reading_order(factors))  # neighbours can become one range
        dims = (*term.dims[:dim], tuple(group), *term.dims[dim + 1 :])
        low, high = term.box[dim]
        box = (*term.box[:dim], (low, low + (high - low) * prod(product.extents)), *term.box[dim + 1 :])
        coefficient: Fraction = product.label[1]  # type: ignore[index]
        return self._settled_whole(Term(coefficient, factors, ranges, dims, box)) or term

    def _in_one_dim(self, term: Term, dims: Sequence[int]) -> Term:
        """The largest over dims is the largest over one dim that has all of their elements. There, in the order in which the
        factors are read, heads and what is in them become one range, which ranges of other ranks continue."""
        factors, last = term.factors, dims[-1]
        group = sorted((v for dim in dims for v in term.dims[dim]), key=_reading_order(factors))
        count: Lane = 1
        for dim in dims:
            count = count * (term.box[dim][1] - term.box[dim][0])
        groups, box = list(term.dims), list(term.box)
        for dim in dims:
            groups[dim], box[dim] = (), (0, 1)
        groups[last], box[last] = tuple(group), (0, collapse(count))
        return self._settled_whole(term.with_(dims=tuple(groups), box=tuple(box))) or term

    def _settled_whole(self, term: Term) -> Term | None:
        """The normal form, if it still says all: zeros beside a smaller box would count, too."""
        found = self.table.settle(term)
        whole = found is not None and all(
            equal(a, b) for x, y in zip(found.box, term.box, strict=True) for a, b in zip(x, y, strict=True)
        )
        return found if whole and found is not None and not found.summed and not varies(found.weight) else None

    def _pieces(self, value: Value, dims: Sequence[int]) -> list[Value]:
        """The tensor cut along these dims where its terms begin and end."""
        pieces = [value]
        for dim in dims:
            edges = [bound for term in value.terms for bound in term.box[dim]]
            if not all(isinstance(edge, int) for edge in edges):
                if all(equal(low, 0) and equal(high, value.shape[dim]) for low, high in (t.box[dim] for t in value.terms)):
                    continue
                raise Undescribed("the largest element of a tensor in pieces that differ between lanes")
            bounds = sorted({0, self.size(value, dim), *(int(edge) for edge in edges)})
            pieces = [self.cut(piece, dim, low, high) for piece in pieces for low, high in pairwise(bounds)]
        return pieces

    # ------------------------------------------------------------------ shapes
    @staticmethod
    def size(value: Value, dim: int) -> int:
        size = value.shape[dim]
        if not isinstance(size, int):
            raise Undescribed("a dim whose size differs between lanes")
        return size

    def reshape(self, value: Value, shape: Sequence[Lane]) -> Value:
        return reshape(self.table, value, [int(size) for size in shape])

    def expand(self, value: Value, shape: Sequence[Lane]) -> Value:
        return expand(self.table, value, shape)

    def permute(self, value: Value, order: Sequence[int]) -> Value:
        return permute(value, order)

    def transpose(self, value: Value, a: int, b: int) -> Value:
        order = list(range(len(value.shape)))
        order[a], order[b] = order[b], order[a]
        return permute(value, order)

    def cut(self, value: Value, dim: int, start: Lane, stop: Lane) -> Value:
        return folded(self.table, cut(self.table, value, dim, start, stop))

    def concat(self, values: Sequence[Value], dim: int) -> Value:
        return concat(self.table, values, dim)

    def place(self, value: Value, shape: Sequence[Lane], dim: int, start: Lane) -> Value:
        """The tensor in zeros, from a position of a dim on."""
        before = (*shape[:dim], start, *shape[dim + 1 :])
        placed = concat(self.table, [Value(before, ()), value], dim)
        return Value(tuple(shape), placed.terms)

    # ------------------------------------------------------------------ masks and indices
    def compare(self, name: str, a: Value, b: Value, whole: bool) -> Value:
        a, b = self.broadcast(a, b)
        return integer.compare(self.table, name, a, b, whole=whole)

    def negate(self, mask: Value) -> Value:
        return integer.negate(self.table, mask)

    def where(self, mask: Value, a: Value, b: Value) -> Value:
        mask, a, b = self.broadcast(mask, a, b)
        inside, outside = self.atomic(mask), self.atomic(self.negate(mask))
        return folded(self.table, integer.where(self.table, inside, outside, self.atomic(a), self.atomic(b)))

    def choose(self, mask: Value, a: Value | Number, b: Value | Number) -> Value:
        """a where the mask is 1, b where it is 0. Minus infinity is log 0: exp of the choice then has the mask as a factor."""
        a, b = (each if isinstance(each, Value) else self.full((), each) for each in (a, b))
        if self.is_minus_infinity(a):
            return self.add(b, self.log_of_mask(self.negate(mask)))
        if self.is_minus_infinity(b):
            return self.add(a, self.log_of_mask(mask))
        return self.where(mask, a, b)

    def log_of_mask(self, keep: Value) -> Value:
        """0 where the mask is 1, minus infinity where it is 0: a piece of its own, where a position alone decides."""
        gone = self.negate(keep)
        if not gone.terms:
            return Value(keep.shape, ())
        terms = []
        for term in gone.terms:
            (factor,) = term.factors if len(term.factors) == 1 else (None,)
            if factor is None or factor.atom is not STEP or term.coefficient != 1 or len(gone.terms) > 1:
                return self.fn("log", keep)
            piece = self.table.settle(term.with_(factors=(factor._replace(atom=WINDOW),)))
            if piece is not None:
                if piece.factors or piece.summed or any(varies(bound) for span in piece.box for bound in span):
                    return self.fn("log", keep)
                (nothing,) = self.full((), MINUS_INFINITY).terms
                terms.append(piece.with_(factors=nothing.factors))
        return Value(keep.shape, tuple(terms))

    def is_minus_infinity(self, value: Value) -> bool:
        return len(value.terms) == 1 and value.terms[0].coefficient == 1 and is_log_of_nothing(self.table, value.terms[0])

    def one_hot(self, value: Value, size: int, dim: int) -> Value:
        return integer.one_hot(self.table, value, size, dim)

    def need_defined(self, value: Value) -> None:
        """Note that a result is of an operator that may be undefined for some operands."""
        for term in value.terms:
            self.table.need(DEFINED, term.factors[0], term.ranges, term.weight)

    def opaque(
        self, name: str, operands: Sequence[Value], parallel: int, shape: Sequence[int], parameters: tuple[Hashable, ...] = ()
    ) -> Value:
        """An operator of which only this is known: equal rows give equal rows. The first dims of all operands and of the result
        are parallel; the others must be whole, and the result has `shape` there."""
        for dim in range(parallel):
            edges = edges_of(operands, dim)
            if len(edges) > 2 and not self.table.over("cells", len(edges) - 1):
                return self.concat(
                    [self.opaque(name, [self.cut(value, dim, low, high) for value in operands], parallel, shape, parameters)
                     for low, high in pairwise(edges)], dim)  # fmt: skip
        operands = [in_one_piece(self.table, value) for value in operands]
        lead, box_of = LABELS[:parallel], operands[0]
        layout = Layout(self.table)
        parts, used = [], 0
        for number, value in enumerate(operands):
            terms = folded(self.table, value).terms
            if not all(covers(term.box, value.shape) for term in terms):
                raise Undescribed(f"{name} of a tensor in pieces")
            term = plain(self.table, terms)
            if term is None:
                continue
            own = LABELS[parallel + used : parallel + used + len(term.dims) - parallel]
            used += len(own)
            layout.lay(term.with_(factors=weighted(term)), lead + own)
            parts.append((number, term.coefficient, own))
        bounds = [tuple(v for label in own for v in layout.groups[label]) for _, _, own in parts]
        named = []
        for (number, coefficient, _), factors, bound in zip(parts, layout.parts, bounds, strict=True):
            order = Factor(DIMS, tuple(Index(((v, 1),), collapse(-layout.ranges[v][0])) for v in bound))
            named.append(Part((number, coefficient), (order, *factors), bound))
        sizes = tuple(tuple(self.size(value, d) for d in range(parallel, len(value.shape))) for value in operands)
        inside = [f.atom.positive for factors in layout.parts for f in factors]
        positive = name in AMONG and bool(parts) and all(inside) and all(coefficient > 0 for _, coefficient, _ in parts)
        what = (len(shape), sizes, *parameters)
        atom, axes = self.table.define("op", name, what, len(operands), named, layout.ranges, positive=positive)
        variables = [next(self.table.names) for _ in shape]
        ranges: dict[int, Range] = {v: span for v, span in layout.ranges.items() if not any(v in bound for bound in bounds)}
        ranges |= {v: (0, size) for v, size in zip(variables, shape, strict=True)}
        for label, size in zip(lead, box_of.shape, strict=False):  # along which no operand is anything but zero
            if label not in layout.groups and size != 1:
                layout.groups[label] = [repeated := next(self.table.names)]
                ranges[repeated] = (0, size)
        dims = (*(tuple(layout.groups.get(label, ())) for label in lead), *((v,) for v in variables))
        box: tuple[Range, ...] = (*((0, size) for size in box_of.shape[:parallel]), *((0, size) for size in shape))
        at = (*axes, *(Index(((v, 1),)) for v in variables))
        settled = self.table.settle(Term(ONE, (Factor(atom, at),), ranges, dims, box))
        assert settled is not None
        return Value((*box_of.shape[:parallel], *shape), (settled,))
