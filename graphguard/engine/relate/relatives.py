"""Which sequential tensor a value of the ranks is a copy, a tile, a summand or a multiple of."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator
from fractions import Fraction
from functools import cached_property

from graphguard.engine.algebra.expansion import written_out
from graphguard.engine.algebra.value import scale
from graphguard.engine.relate.outputs import Relator, tile_of
from graphguard.engine.store.table import Table
from graphguard.engine.terms.term import FIRST_ID, Undescribed, Value
from graphguard.engine.terms.unknown import Described, Environment
from graphguard.graph.ir import Mesh
from graphguard.graph.ir import Value as Tensor
from graphguard.graph.rank_class import RankClass

NOTHING = Tensor(-1, (), "")  # what values that are numbers alone are related to


class Relatives:
    """Described tensors, by what they and their multiples have in common. parts: with their summands, which the other program
    may make on their own."""

    def __init__(self, relator: Relator, environment: Environment, mesh: Mesh, parts: bool = False):
        self.relator, self.table, self.mesh = relator, relator.table, mesh
        self.stops = relator.table.stops
        self._environment, self._parts = environment, parts

    @cached_property
    def _by_key(self) -> dict[Hashable, list[tuple[Tensor, Value]]]:
        return _index(self.table, self._environment, self._parts)

    def alike(self, value: Value) -> list[Tensor]:
        """Tensors that a value may be a part or a multiple of."""
        return [tensor for tensor, _ in self._few(opened(self.table, value))]

    def relation(self, stream: RankClass, value: Described | None) -> Tensor | None:
        """The tensor that a rank's value is related to."""
        if not isinstance(value, Value):
            return None
        if is_plain(value):
            return NOTHING
        for total in self._totals(stream, value):
            plain = opened(self.table, total)
            for tensor, whole in self._few(plain):
                if tile_of(self.table, whole, scale(plain, _lead(whole) / _lead(plain))) is not None:
                    return tensor
        return None

    def _few(self, value: Value) -> list[tuple[Tensor, Value]]:
        found = self._by_key.get(_key(value), [])
        return found[: self.stops.limits.candidates] if self.stops.over("candidates", len(found)) else found

    def _totals(self, stream: RankClass, value: Value) -> Iterator[Value]:
        """The value, and its sums over axes of the mesh if all ranks are in one class."""
        yield value
        axes = [n for n, size in enumerate(self.mesh.shape) if size > 1]
        if stream.lanes != self.mesh.size or self.stops.over("summed_terms", len(value.terms)):
            return
        for count in range(1, len(axes) + 1):
            for chosen in itertools.combinations(axes, count):
                total = value
                try:
                    for axis in chosen:
                        total = self.relator.reduced(total, self.mesh, axis, "sum")
                except Undescribed:
                    continue
                yield total


def is_plain(value: Value) -> bool:
    """Whether a value is made of numbers and positions alone."""
    return all(factor.atom.id < FIRST_ID for term in value.terms for factor in term.factors)


def _key(value: Value) -> Hashable:
    """Equal for a tensor, its tiles, and multiples of them: a mean over a part is on its way to the mean, and a wrong scale is
    told at the end."""
    lead = _lead(value)
    return frozenset((term.coefficient / lead, tuple((f.atom.id, f.power) for f in term.factors)) for term in value.terms)


def _lead(value: Value) -> Fraction:
    """The coefficient by which multiples are compared."""
    chosen = max(value.terms, key=lambda term: [(f.atom.id, f.power) for f in term.factors], default=None)
    return Fraction(1) if chosen is None else chosen.coefficient


def _index(table: Table, environment: Environment, parts: bool = False) -> dict[Hashable, list[tuple[Tensor, Value]]]:
    """Tensors by key; with their summands, which the other program may make on their own."""
    found: dict[Hashable, list[tuple[Tensor, Value]]] = defaultdict(list)
    for tensor, value in environment.items():
        if isinstance(value, Value):
            plain = opened(table, value)
            found[_key(plain)].append((tensor, plain))
            if parts and len(plain.terms) > 1:
                for term in plain.terms:
                    part = Value(value.shape, (term,))
                    found[_key(part)].append((tensor, part))
    return found


def opened(table: Table, value: Value) -> Value:
    """A sum that has a name of its own, as its summands: sums of parts have other names than those of all."""
    term = value.terms[0] if len(value.terms) == 1 and len(value.terms[0].factors) == 1 else None
    if term is None or term.factors[0].atom.kind != "lin":
        return value
    return Value(value.shape, tuple(written_out(table, term, term.factors[0].atom)))
