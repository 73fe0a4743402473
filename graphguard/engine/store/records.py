"""All that descriptions may ask about atoms, under one journal."""

from __future__ import annotations

import itertools

from graphguard.engine.limits import ProofStops
from graphguard.engine.store.atoms import Atoms
from graphguard.engine.store.definitions import Definitions
from graphguard.engine.store.facts import Facts
from graphguard.engine.store.filed import Filed
from graphguard.engine.store.journal import Journal
from graphguard.engine.store.need import NeedList
from graphguard.engine.store.reached import Reached


class Records:
    """What is not recorded is private to its parts."""

    def __init__(self, stops: ProofStops) -> None:
        self.journal = Journal()
        self.stops, self.limits = stops, stops.limits
        self._reached = Reached(self.journal, stops)
        self.store = Atoms(self.journal)
        self.definitions = Definitions(self.store)
        self.facts = Facts(self.journal, self.definitions)  # what is known of some elements of atoms
        self.sums = Filed(self.journal)  # of the sequential program
        self.needs = NeedList(self.journal)  # of the ranks
        self.names = itertools.count()  # for variables

    def over(self, limit: str, needed: int) -> bool:
        """Whether more is needed than a limit allows. Where this is described again, the limit is reached again."""
        if needed <= getattr(self.limits, limit):
            return False
        if self.journal.answering:  # and so asked again
            self.stops.note(limit, needed)
        else:
            self._reached.note(limit, needed)
        return True
