"""The table of one proof: its atoms, what is known of them, and the run that is being described."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from graphguard.engine.limits import ProofStops
from graphguard.engine.store.facts import Kind
from graphguard.engine.store.folding import RanksRun, SequentialRun
from graphguard.engine.store.need import DEFINED
from graphguard.engine.store.records import Records
from graphguard.engine.terms.definition import Part
from graphguard.engine.terms.lane import Lane
from graphguard.engine.terms.rational import prime_powers
from graphguard.engine.terms.term import ONE, Atom, Factor, Index, Range, Term, Variable
from graphguard.graph.exposure import Shown


class Table(Records):
    """Descriptions ask it through what is recorded. Beyond that they are functions of its mode."""

    def __init__(self, stops: ProofStops | None = None) -> None:
        super().__init__(ProofStops() if stops is None else stops)
        self._runs = RanksRun(self), SequentialRun(self)
        self.answers: dict[str, dict[int, Any]] = defaultdict(dict)  # of questions that follow from definitions alone, by atom
        self.run: RanksRun | SequentialRun = self._runs[True]
        self.folding = True  # off while sums are written out
        self.ignores_by_default = True  # whether a label may be the one that losses leave out by default
        self.work = 0  # factors of all terms that were settled: what a proof takes, whatever the machine
        self.shown = Shown.ALL  # what an output shows of what is undefined in the result of the operation that is described

    @property
    def mode(self) -> Hashable:
        """All that a description may look at beside its operands and its questions."""
        return self.run, self.folding, self.ignores_by_default, self.shown

    @property
    def recording(self) -> bool:
        """Whether the sequential program is described."""
        return self.run is self._runs[True]

    @recording.setter
    def recording(self, sequential: bool) -> None:
        self.run = self._runs[sequential]

    # ------------------------------------------------------------------ atoms
    def atom(self, kind: str, key: Hashable) -> Atom:
        """The one atom of this kind and key."""
        return self.store.named(kind, key)

    def atoms(self) -> Iterable[tuple[tuple[str, Hashable], Atom]]:
        """All atoms that have keys."""
        return self.store.every()

    def define(
        self,
        kind: str,
        name: str,
        parameters: tuple[Hashable, ...],
        operands: int,
        parts: Sequence[Part],
        ranges: Mapping[Variable, Range],
        **facts: bool,
    ) -> tuple[Atom, tuple[Index, ...]]:
        """The atom of a definition, and the positions at which it is read. The label of each part begins with its operand
        and its coefficient."""
        return self.definitions.define((kind, name, parameters, operands), parts, ranges, **facts)

    def root(self, number: Fraction, exponent: Fraction) -> tuple[Fraction, tuple[Factor, ...]]:
        """A power of a positive number: a rational, and powers of primes between 0 and 1."""
        scale, factors, primes = ONE, [], prime_powers(number)
        for prime, times in ((number, 1),) if primes is None else primes:
            whole, rest = divmod(times * exponent, 1)
            scale *= Fraction(prime) ** whole
            if rest:
                factors.append(Factor(self.store.number(Fraction(prime)), (), rest))
        return scale, tuple(factors)

    def pi(self) -> Atom:
        return self.store.number(repr(math.pi))

    # ------------------------------------------------------------------ what the two runs do each in its way
    def settle(self, term: Term) -> Term | None:
        """The normal form, with filed sums in place of what they stand for; the sequential run files what is left."""
        self.work += len(term.factors)
        return self.run.settle(term) if self.folding else self.run.simplified(term)

    def filed(self, term: Term) -> Term:
        """The term without sums: an atom for each."""
        return self.run.filed(term)

    def need(self, kind: Kind, factor: Factor, ranges: Mapping[Variable, Range], weight: Lane = 1) -> None:
        """Note what is needed of an atom where a factor reads it, so that an operation is defined. Of the sequential program
        that holds, as it is taken to be defined; of the ranks it has to be shown."""
        if kind == DEFINED or not factor.atom.positive:
            self.run.need(kind, factor, ranges, weight, self.shown)
