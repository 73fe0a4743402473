"""How much is tried to find where the ranks go wrong, and what would mend it."""

from __future__ import annotations

from dataclasses import dataclass

from graphguard.graph.limits import limit


@dataclass(frozen=True)
class Limits:
    elements: int = limit(3_000_000, "tensors of the sequential program of more than {} elements in all", proves=False)
    elements_of_ranks: int = limit(12_000_000, "tensors of the ranks of more than {} elements in all", proves=False)
    earlier_tensors: int = limit(64, "more than {} tensors before a suspect", proves=False)
    wrong_outputs: int = limit(8, "more than {} wrong outputs that are followed to where they become wrong", proves=False)
    wanted_tries: int = limit(400, "more than {} tries of what tensors should have been", proves=False)
    repair_ms: int = limit(1000, "repairs that take more than {} ms to try, as estimated from shapes", proves=False)
    repair_proofs: int = limit(3, "more than {} repairs that are proved", proves=False)
    repair_operations: int = limit(20_000, "repairs of programs of more than {} operations", proves=False)
    sites: int = limit(120, "more than {} places where another operation is tried", proves=False)
