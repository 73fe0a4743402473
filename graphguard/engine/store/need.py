"""What operations of the ranks need, so that they are defined."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from graphguard.engine.store.facts import Kind
from graphguard.engine.store.journal import Journal, Recorded, spoils, told
from graphguard.engine.terms.lane import Lane, key
from graphguard.engine.terms.term import Factor, Range, Variable

NOT_ZERO: Kind = "nonzero"
NOT_NEGATIVE: Kind = "nonnegative"
DEFINED: Kind = "computed"  # of a function or an operator


class Need(NamedTuple):
    """What an operation needs of an atom, where a factor reads it."""

    kind: Kind
    factor: Factor
    ranges: Mapping[Variable, Range]
    weight: Lane

    @property
    def key(self) -> Hashable:
        """Equal for needs that are alike but for the names of variables."""
        names = {v: n for n, v in enumerate(dict.fromkeys(self.factor.variables()))}
        at = tuple((tuple((names[v], s) for v, s in index.terms), key(index.offset)) for index in self.factor.at)
        spans = tuple((key(self.ranges[v][0]), key(self.ranges[v][1])) for v in names)
        return self.kind, self.factor.atom.id, at, spans, key(self.weight)


class NeedList(Recorded):
    """What the ranks were noted to need, in order."""

    def __init__(self, journal: Journal):
        super().__init__(journal)
        self._needs: list[Need] = []

    @told
    def note(self, kind: Kind, factor: Factor, ranges: Mapping[Variable, Range], weight: Lane) -> None:
        self._needs.append(Need(kind, factor, {v: ranges[v] for v in factor.variables()}, weight))

    @spoils
    def count(self) -> int:
        return len(self._needs)

    @spoils
    def since(self, count: int) -> tuple[Need, ...]:
        return tuple(self._needs[count:])

    @spoils
    def forget_since(self, count: int) -> None:
        del self._needs[count:]
