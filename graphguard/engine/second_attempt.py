"""A second attempt at a proof."""

from __future__ import annotations

from collections.abc import Callable

from graphguard.engine.limits import Limits, ProofStops
from graphguard.engine.proof import Proof

# Of what is described well, on all ranks: another description would say the same.
_SETTLED = frozenset({"unexpected-relation", "missing-output", "scaled-copies"})


def proved_apart(first: Proof, ranks: int, attempt: Callable[[], Proof], limits: Limits | None = None) -> Proof:
    """The proof of programs that were not seen to differ: where the first attempt does not prove it, a second one describes
    each rank by itself, which proves some programs in which ranks that are alike have pieces in a different order. It counts if
    it leaves less open, and takes as many times as long as there are ranks."""
    outputs = tuple(each.output for each in first.findings if each.output is not None and each.kind not in _SETTLED)
    if first.proved or ranks == 1 or not outputs:
        return first
    stops = ProofStops(limits)
    if stops.over("ranks_apart", ranks):
        first.stopped += (stops.stop("ranks_apart", ranks, outputs),)
        return first
    if stops.over("operations_apart", first.operations):
        first.stopped += (stops.stop("operations_apart", first.operations, outputs),)
        return first
    again = attempt()
    again.seconds += first.seconds
    return again if len(again.findings) < len(first.findings) else first
