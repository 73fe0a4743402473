"""How much is executed, and how much is tried on its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from graphguard.graph.limits import limit


@dataclass(frozen=True)
class Limits:
    trial_bytes: int = limit(2 << 30, "trials whose tensors need more than {} bytes")
    trial_seconds: int = limit(20, "trials of more than {} s, as estimated from shapes")
    tile_elements: int = limit(4_000_000, "more than {} elements compared for where in an output a tensor lies")
    tile_dims: int = limit(5, "tiles in another order of more than {} dims, in numbers")
    placements: int = limit(8192, "more than {} placements that are compared with what ranks hold")
