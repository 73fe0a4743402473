"""What a front end makes of two programs: a problem, stated in graphs alone. Whoever decides it needs no framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from graphguard.errors import UsageError
from graphguard.graph.dtypes import class_of
from graphguard.graph.ir import Graph, Mesh
from graphguard.graph.matching import Joint
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
    ranks: list[Graph]
    relations: list[Graph]
    joint: Joint
    seconds: float = 0.0
    assumptions: list[str] = field(default_factory=list)
    unstable: str | None = None  # a rank's graph differs from capture to capture, and how
    classes: int | None = None  # of ranks that were captured at once; None if every rank was captured by itself
    by_rank: str | None = None  # why every rank was, where classes were tried


@dataclass(frozen=True)
class Problem:
    """Whether the ranks refine the sequential program.

    expected: by output, what is known or stated of it; an output that is not listed may have any clean relation.
    bounds: of every input that the user names, (None, None) where none is stated.
    parameters: by parameter of a module, its relation to the ranks' ones and how it was found, for the report.
    guesses: what was taken for granted of parameters.
    """

    mesh: Mesh
    captured: Captured
    expected: Mapping[str, Expectation] = field(default_factory=dict)
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    guesses: tuple[str, ...] = ()

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
