"""A second attempt at a proof."""

from __future__ import annotations

from collections.abc import Callable

from graphguard.engine.limits import Limits, ProofStops
from graphguard.engine.proof import Proof


def proved_apart(first: Proof, ranks: int, attempt: Callable[[], Proof], limits: Limits | None = None) -> Proof:
    """The proof of programs that were seen to agree: where the first attempt does not prove it, a second one describes each
    rank by itself, which proves some programs in which ranks that are alike have pieces in a different order. It counts if it
    leaves less open, and takes as many times as long as there are ranks."""
    if first.proved or ranks == 1:
        return first
    stops = ProofStops(limits)
    if stops.over("ranks_apart", ranks):
        outputs = tuple(finding.output for finding in first.findings if finding.output is not None)
        first.stopped += (stops.stop("ranks_apart", ranks, outputs),)
        return first
    again = attempt()
    again.seconds += first.seconds
    return again if len(again.findings) < len(first.findings) else first
