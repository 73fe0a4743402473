"""A second attempt at a proof."""

from __future__ import annotations

from collections.abc import Callable

from graphguard.engine.limits import Limits, ProofStops
from graphguard.engine.proof import Proof


def proved_apart(first: Proof, ranks: int, attempt: Callable[..., Proof], limits: Limits | None = None) -> Proof:
    """The proof of programs that were seen to agree: where the first attempt does not prove it, a second one describes each
    rank by itself. It counts if it leaves less open. attempt: `prove`, with all of its arguments but `apart`."""
    if first.proved or ranks == 1:
        return first
    stops = ProofStops(limits)
    if stops.over("ranks_apart", ranks):
        outputs = tuple(finding.output for finding in first.findings if finding.output is not None)
        first.stopped += (stops.stop("ranks_apart", ranks, outputs),)
        return first
    again = attempt(apart=True)
    again.seconds += first.seconds
    return again if len(again.findings) < len(first.findings) else first
