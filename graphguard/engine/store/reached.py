"""Limits of work that descriptions reach."""

from __future__ import annotations

from graphguard.engine.limits import ProofStops
from graphguard.engine.store.journal import Journal, Recorded, told


class Reached(Recorded):
    def __init__(self, journal: Journal, stops: ProofStops):
        super().__init__(journal)
        self._stops = stops

    @told
    def note(self, limit: str, needed: int) -> None:
        self._stops.note(limit, needed)
