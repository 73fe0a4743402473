"""Classes of ranks written out: the graph of each rank by itself, made when somebody asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from graphguard.graph.findings import Finding
from graphguard.graph.ir import Graph
from graphguard.graph.matching import Joint, join
from graphguard.graph.rank_class import RankClass


class Expanded(Sequence[Graph]):
    """By rank, its input relation (part 0) or its program (part 1)."""

    def __init__(self, classes: Sequence[RankClass], part: int):
        self._class_of = {rank: each for each in classes for rank in each.members}
        self._part = part
        self._made: dict[int, Graph] = {}

    def __len__(self) -> int:
        return len(self._class_of)

    @overload
    def __getitem__(self, rank: int) -> Graph: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Graph]: ...
    def __getitem__(self, rank: int | slice) -> Graph | list[Graph]:
        if isinstance(rank, slice):
            return [self[each] for each in range(*rank.indices(len(self)))]
        rank = range(len(self))[rank]
        if rank not in self._made:
            self._made[rank] = self._class_of[rank].at(rank)[self._part]
        return self._made[rank]


class ExpandedJoint(Joint):
    """All ranks of some classes; which nodes of which ranks are one communication is found when it is asked for."""

    def __init__(self, graphs: Sequence[Graph], findings: list[Finding]):
        self.graphs, self.findings = graphs, findings

    def written_out(self) -> Joint:
        """With a graph for every rank."""
        return join(list(self.graphs))

    def __getattr__(self, name: str) -> Any:
        if name not in ("matches", "_by_node"):
            raise AttributeError(name)
        found = self.written_out()
        self.matches, self._by_node = found.matches, found._by_node
        return getattr(self, name)
