"""All ranks of a program by classes, and which operations of which classes are one communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from graphguard.graph.findings import Finding
from graphguard.graph.ir import Mesh, Node
from graphguard.graph.rank_class import Numbers, RankClass

Place = tuple[int, int]  # a class, by its number, and the position of an operation in its graph


@dataclass(frozen=True, eq=False)
class Meeting:
    """One collective in all of its groups. members: their ranks, a row for each group. places: who takes part."""

    members: Numbers
    places: tuple[Place, ...]

    def moved(self, places: Mapping[Place, Place]) -> Meeting:
        return Meeting(self.members, tuple(places[place] for place in self.places))


class Peer(NamedTuple):
    """The other side of some messages: where it is, and which lanes here exchange one with which lanes there."""

    place: Place
    here: Numbers
    there: Numbers


@dataclass(frozen=True, eq=False)
class Messages:
    """What the ranks of a class send at one operation, or receive there."""

    peers: tuple[Peer, ...]

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(peer.place for peer in self.peers)

    def moved(self, places: Mapping[Place, Place]) -> Messages:
        return Messages(tuple(peer._replace(place=places[peer.place]) for peer in self.peers))


@dataclass
class World:
    """With findings, `calls` is empty: the communication does not fit together."""

    mesh: Mesh
    classes: Sequence[RankClass]
    calls: dict[Place, Meeting | Messages] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @cached_property
    def class_of(self) -> Numbers:
        """By rank, the number of its class."""
        return self._by_rank([np.full(each.lanes, number) for number, each in enumerate(self.classes)])

    @cached_property
    def lane_of(self) -> Numbers:
        """By rank, its place in its class."""
        return self._by_rank([np.arange(each.lanes) for each in self.classes])

    def _by_rank(self, columns: Sequence[Numbers]) -> Numbers:
        found = np.empty(self.mesh.size, dtype=np.int64)
        for each, column in zip(self.classes, columns, strict=True):
            found[each.ranks] = column
        return found

    def returning(self, path: str) -> list[bool]:
        """By rank, whether it returns an output."""
        found = np.array([each.graph.outputs.get(path) is not None for each in self.classes])
        return found[self.class_of].tolist()  # type: ignore[no-any-return]

    def node(self, place: Place) -> Node:
        return self.classes[place[0]].graph.nodes[place[1]]

    def together(self, place: Place) -> Iterator[Place]:
        """An operation, and those of other classes that it communicates with."""
        call = self.calls.get(place)
        yield place
        if call is not None:
            yield from (other for other in call.places if other != place)
