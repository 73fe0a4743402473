"""What a front end makes of two programs: a problem, stated in graphs alone. Whoever decides it needs no framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from graphguard.errors import UsageError
from graphguard.graph.class_matching import join_classes, world_of
from graphguard.graph.dtypes import class_of
from graphguard.graph.expanded import Expanded, ExpandedJoint
from graphguard.graph.ir import Constant, Graph, Mesh, Value
from graphguard.graph.matching import Joint
from graphguard.graph.rank_class import RankClass
from graphguard.graph.world import World
from graphguard.relation.expectation import Expectation

Progress = Callable[[str, int, int], None]  # what is going on, how much of it is done, and how much there is
Bounds = tuple[float | None, float | None]  # low <= v < high
MOST_RANKS = 1 << 16
_APART: ContextVar[bool] = ContextVar("ranks apart", default=False)


@dataclass
class Captured:
    """The graphs of a check. `relations[r]` takes the sequential inputs to rank r's; `joint` has the ranks' communication
    matched."""

    sequential: Graph
    ranks: Sequence[Graph]
    relations: Sequence[Graph]
    joint: Joint
    seconds: float = 0.0
    assumptions: list[str] = field(default_factory=list)
    unstable: str | None = None  # a rank's graph differs from capture to capture, and how
    classes: int | None = None  # of ranks that were captured at once; None if every rank was captured by itself
    by_rank: str | None = None  # why every rank was, where classes were tried
    matched: World | None = None  # the classes, where the ranks are too many to be matched one by one

    def world(self, apart: bool = False) -> World:
        """The ranks by classes; or each as a class of its own."""
        if self.matched is not None and not apart:
            return self.matched
        return world_of(self.joint, self.relations, apart)

    @property
    def held(self) -> Sequence[RankClass]:
        """The ranks as they were captured: by classes, or one by one."""
        if self.matched is not None:
            return self.matched.classes
        pairs = zip(self.relations, self.ranks, strict=True)
        return [RankClass(np.array([rank]), *pair) for rank, pair in enumerate(pairs)]

    @property
    def weighted(self) -> list[tuple[Graph, int]]:
        """Each graph of the ranks, and how many of them have it."""
        return [(graph, each.lanes) for each in self.held for graph in (each.graph, each.relation)]

    @property
    def operations(self) -> int:
        """Of the sequential program, and of every rank."""
        return len(self.sequential.nodes) + sum(len(each.graph.nodes) * each.lanes for each in self.held)

    def with_relations(self, other: Captured) -> Captured:
        """The same programs, with the input relations of another capture."""
        if self.matched is None:
            return replace(self, relations=list(other.relations))
        parts = [
            RankClass(ranks, theirs.part(there).relation, mine.part(here).graph)
            for mine in self.matched.classes
            for theirs in other.held
            for ranks, here, there in [np.intersect1d(mine.ranks, theirs.ranks, assume_unique=True, return_indices=True)]
            if len(ranks)
        ]
        made = captured_by_classes(self.sequential, join_classes(parts, self.matched.mesh))
        return replace(self, ranks=made.ranks, relations=made.relations, joint=made.joint, matched=made.matched)

    def returning(self, path: str) -> list[bool]:
        """By rank, whether it returns an output."""
        return (self.joint if self.matched is None else self.matched).returning(path)


def captured_by_classes(sequential: Graph, world: World) -> Captured:
    """Of very many ranks, whose own graphs are written out only if they are asked for."""
    graphs, relations = Expanded(world.classes, 1), Expanded(world.classes, 0)
    return Captured(sequential, graphs, relations, ExpandedJoint(graphs, world.findings), matched=world)


@dataclass(frozen=True)
class Decision:
    """Whole numbers that the sequential program makes, or is given, by which a program goes one way or another."""

    text: str  # `topk at moe.py:318`, `the input lengths`
    chosen: Constant  # what they are on the path


@dataclass(frozen=True)
class Along:
    """The path of a sample: all inputs for which the sequential program decides as it does on the sample.

    sample: the inputs of the sequential program.
    raw: the programs as they were recorded; the problem's own graphs are written for the path.
    decisions: of the sequential program, all that is assumed of the inputs.
    deciding: by program as it was recorded, the sequential one first, the values that decide, and what they are on the path.
    of_ranks: by output that says that ranks decide as the sequential program does, the decision in words.
    unexplained: what ranks decide, or receive, that is not known to follow.
    """

    sample: Mapping[str, Constant]
    raw: Captured
    decisions: tuple[Decision, ...]
    deciding: tuple[Mapping[Value, Constant], ...]
    of_ranks: Mapping[str, str]
    unexplained: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """Whether the ranks refine the sequential program.

    expected: by output, what is known or stated of it; an output that is not listed may have any clean relation.
    bounds: of every input that the user names, (None, None) where none is stated.
    parameters: by parameter of a module, its relation to the ranks' ones and how it was found, for the report.
    guesses: what was taken for granted of parameters.
    along: the path on which this is asked, if it is not for all inputs.
    """

    mesh: Mesh
    captured: Captured
    expected: Mapping[str, Expectation] = field(default_factory=dict)
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    guesses: tuple[str, ...] = ()
    along: Along | None = None

    @property
    def ranges(self) -> dict[str, Bounds]:
        """The bounds that the proof uses."""
        return ranges_of(self.captured.sequential, self.bounds)


@contextmanager
def ranks_apart(apart: bool = True) -> Iterator[None]:
    """Inside, every rank is captured by itself: the reference that classes of ranks are compared with."""
    token = _APART.set(apart)
    try:
        yield
    finally:
        _APART.reset(token)


def are_ranks_apart() -> bool:
    return _APART.get()


class FrontEnd(Protocol):
    """Two programs of some framework, and what the user says of them."""

    @property
    def mesh(self) -> Mesh: ...

    def capture(self, progress: Progress | None = None) -> Captured:
        """The graphs alone."""

    def problem(self, opaque: frozenset[str], progress: Progress | None = None) -> Problem:
        """The graphs, and what is expected of them. Operators that are `opaque` have lemmas, and are not looked into."""


def ranges_of(sequential: Graph, bounds: Mapping[str, Bounds]) -> dict[str, Bounds]:
    """Bounds of floats as they are, and of whole numbers as whole ones; of booleans and complex numbers none."""
    ranges: dict[str, Bounds] = {}
    for name, (low, high) in bounds.items():
        kind = class_of(sequential.inputs[name].dtype)
        if (low, high) != (None, None) and kind in "fwn":
            ranges[name] = (low, high) if kind == "f" else (_ceiling(low), _ceiling(high))
    return ranges


def _ceiling(bound: float | None) -> int | None:
    return math.ceil(bound) if bound is not None and math.isfinite(bound) else None


def require_outputs(sequential: Graph) -> None:
    if all(value is None for value in sequential.outputs.values()):
        raise UsageError(
            "the sequential program returns no tensor, so there is nothing to verify; return what the ranks should match"
        )


def mesh_of(mesh: Mapping[str, int] | int) -> Mesh:
    """The mesh that the user wrote: `{axis: size}`, or a world size."""
    if not isinstance(mesh, (int, Mapping)):
        raise UsageError(f"the mesh is {mesh!r}; write {{axis: size}}, or the number of ranks")
    axes = {"world": mesh} if isinstance(mesh, int) else dict(mesh)
    if not axes:
        raise UsageError("the mesh has no axes; write for example mesh={'tp': 4}")
    for name, size in axes.items():
        if not isinstance(name, str) or not isinstance(size, int) or isinstance(size, bool):
            raise UsageError(f"the mesh must map axis names to sizes, not {name!r} to {size!r}")
        if size < 1:
            raise UsageError(f"mesh axis {name!r} has size {size}; every axis needs at least one rank")
    made = Mesh.of(axes)
    if made.size > MOST_RANKS:
        raise UsageError(f"the mesh has more than {MOST_RANKS} ranks, and each of them is captured; verify a smaller one")
    return made
