"""The front end for JAX: what the user passes to `gg.jax.verify`, and the problem that it states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from graphguard.capture.front import Bounds, Captured, Problem, Progress, mesh_of, require_outputs
from graphguard.capture.jax.kernels import KernelLemma
from graphguard.capture.jax.rules.calls import equations
from graphguard.capture.jax.session import Session
from graphguard.capture.jax.trace import Argument, Traced, arguments_of, trace
from graphguard.errors import UsageError
from graphguard.graph.ir import Mesh
from graphguard.relation.expectation import Expectation

_UNSIGNED_BOUNDS = (0, 1 << 32)


@dataclass(frozen=True)
class JaxFrontEnd:
    """Two functions of the same global arrays. ranges: by array, low <= v < high."""

    sequential: Callable[..., Any]
    distributed: Callable[..., Any]
    mesh: Mesh
    args: Sequence[Any]
    ranges: Mapping[str, Bounds]
    kernels: Mapping[str, KernelLemma] = field(default_factory=dict)

    def capture(self, progress: Progress | None = None) -> Captured:
        return self._captured(progress)[1]

    def problem(self, opaque: frozenset[str], progress: Progress | None = None) -> Problem:
        session, captured = self._captured(progress)
        require_outputs(captured.sequential)
        expected = {path: Expectation(", ".join(map(str, placed)), placed) for path, placed in session.placements.items()}
        known = captured.sequential.outputs
        return Problem(self.mesh, captured, {path: each for path, each in expected.items() if path in known}, session.bounds)

    def _captured(self, progress: Progress | None) -> tuple[Session, Captured]:
        session = Session(self.mesh, self._arguments, self._bounds, self.kernels)
        sequential, distributed = (trace(*each) for each in self._programs)
        _require_shard_map(distributed, self.mesh)
        if progress is not None:
            progress("the programs", 0, 0)
        return session, session.capture(sequential, distributed)

    @property
    def _programs(self) -> list[tuple[Callable[..., Any], Sequence[Any], str]]:
        return [(self.sequential, self.args, "sequential"), (self.distributed, self.args, "distributed")]

    @cached_property
    def _arguments(self) -> list[Argument]:
        return arguments_of(self.sequential, self.args)

    @property
    def _bounds(self) -> dict[str, Bounds]:
        names = [each.name for each in self._arguments]
        for name, bounds in self.ranges.items():
            if name not in names:
                raise UsageError(f"ranges= names {name!r}, which is no array of args=; they are {', '.join(names)}")
            if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
                raise UsageError(f"ranges=: write {{{name!r}: (low, high)}}, which is low <= v < high")
        nothing: dict[str, Bounds] = {
            each.name: _UNSIGNED_BOUNDS if each.is_unsigned else (None, None) for each in self._arguments
        }
        return {**nothing, **{name: (bounds[0], bounds[1]) for name, bounds in self.ranges.items()}}


def functions(
    sequential: Callable[..., Any],
    distributed: Callable[..., Any],
    mesh: Mapping[str, int],
    args: Sequence[Any],
    ranges: Mapping[str, Bounds] | None,
    kernels: Sequence[KernelLemma] = (),
) -> JaxFrontEnd:
    for side, function in (("sequential", sequential), ("distributed", distributed)):
        if not callable(function):
            raise UsageError(f"{side}= is {type(function).__name__}, not a function of global arrays")
    if not isinstance(args, (tuple, list)):
        raise UsageError(f"args= is {type(args).__name__}; write a tuple, one entry for each argument of the functions")
    if ranges is not None and not isinstance(ranges, Mapping):
        raise UsageError(f"ranges= is {type(ranges).__name__}; write {{name: (low, high)}}")
    return JaxFrontEnd(
        sequential, distributed, mesh_of(mesh), args, dict(ranges or {}), {each.kernel: each for each in kernels}
    )


def _require_shard_map(distributed: Traced, mesh: Mesh) -> None:
    if not any(each.primitive.name == "shard_map" for each in equations(distributed.jaxpr.jaxpr)):
        raise UsageError(
            f"the distributed program has no jax.shard_map over {mesh}, so nothing in it says what a device does; what XLA "
            "makes of jax.jit with shardings is checked by `graphguard verify-hlo`"
        )
