"""A second attempt at a proof."""

from __future__ import annotations

from collections.abc import Callable

from graphguard.engine.proof import Proof

MOST_RANKS_APART = 8  # that are described one by one where describing them together does not prove it


def proved_apart(first: Proof, ranks: int, attempt: Callable[..., Proof]) -> Proof:
    """The proof of programs that were seen to agree: where the first attempt does not prove it, a second one describes each
    rank by itself. It counts if it leaves less open. attempt: `prove`, with all of its arguments but `apart`."""
    if first.proved or not 1 < ranks <= MOST_RANKS_APART:
        return first
    again = attempt(apart=True)
    again.seconds += first.seconds
    return again if len(again.findings) < len(first.findings) else first
