"""How much is executed, and how much is tried on its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from graphguard.graph.limits import limit


@dataclass(frozen=True)
class Limits:
    trial_bytes: int = limit(2 << 30, "trials whose tensors need more than {} bytes")
    trial_seconds: int = limit(20, "trials of more than {} s, as estimated from shapes")
    placements: int = limit(8192, "more than {} placements that are compared with what ranks hold")
