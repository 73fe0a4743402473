"""What is expected of an output: placements, or graphs that take the full output to each rank's; and who must return it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphguard.graph.ir import Graph
from graphguard.graph.placement import Placements

FULL, LOCAL = "full", "local"  # the input and the output of an expectation's graphs


@dataclass(frozen=True)
class Need:
    """Of some ranks, at least one must return the output: else something is nowhere. `what` says it, after the path. With
    `every`, each of them must, and `what` says it of a {rank}."""

    ranks: tuple[int, ...]
    what: str
    every: bool = False

    def unmet(self, returned: Sequence[bool]) -> Iterator[Need]:
        """What is nowhere. returned: by rank, whether it returns the output."""
        if self.every:
            yield from (Need((rank,), self.what.format(rank=rank)) for rank in self.ranks if not returned[rank])
        elif not any(returned[rank] for rank in self.ranks):
            yield self


@dataclass(frozen=True)
class Expectation:
    """Placements or graphs, never both; with neither, any clean relation will do.

    placements: one per mesh axis, in mesh order; dims count from the front.
    graphs: one per rank, from the input "full" (the sequential output) to the output "local" (what the rank should return);
        None for a rank that does not return the output.
    text: for messages.
    needs: who must return it. wrong: why it cannot be right, whatever its values are.
    assumed: what was not checked of the code.
    """

    text: str
    placements: Placements | None = None
    graphs: tuple[Graph | None, ...] | None = None
    needs: tuple[Need, ...] = ()
    wrong: str | None = None
    assumed: str | None = None

    @property
    def states_relation(self) -> bool:
        return self.placements is not None or self.graphs is not None

    def unmet(self, returned: Sequence[bool]) -> list[Need]:
        """What is nowhere. returned: by rank, whether it returns the output."""
        return unmet(self.needs, returned)


def unmet(needs: Sequence[Need], returned: Sequence[bool]) -> list[Need]:
    return [missing for need in needs for missing in need.unmet(returned)]
