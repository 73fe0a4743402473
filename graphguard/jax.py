"""`gg.jax`: what users of JAX call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphguard.capture.front import Captured
from graphguard.capture.jax.front import functions
from graphguard.pipeline import Job, run
from graphguard.report.report import Report
from graphguard.scope import counted

__all__ = ["capture", "verify"]
Range = tuple[float | None, float | None]


@counted
def verify(
    sequential: Callable[..., Any],
    distributed: Callable[..., Any],
    *,
    mesh: Mapping[str, int],
    args: Sequence[Any],
    ranges: Mapping[str, Range] | None = None,
    lemmas: Sequence[Any] = (),
    trials: int | None = None,
    seed: int = 0,
    limits: Mapping[str, int] | None = None,
) -> Report:
    """Whether the distributed function computes what the sequential one does, for all inputs.

    sequential, distributed: functions of the same global arrays, which return pytrees of arrays. The distributed one has a
        `jax.shard_map` over `jax.sharding.AbstractMesh(sizes, names)`, or over a mesh of devices; `in_specs` and `out_specs`
        say what each device has. Either may take gradients, inside of the shard_map or around it.
    mesh: `{axis: size}`, the axes of that mesh. No devices are needed.
    args: one entry for each argument: pytrees of `jax.ShapeDtypeStruct`, or of arrays, of which only shapes are used.
    ranges: `{name: (low, high)}`, low <= v < high, for arrays of whole numbers that index: names are those of the sequential
        function's parameters, `labels` or `batch.labels`.

    All other arguments are those of `gg.verify`.
    """
    return run(Job(functions(sequential, distributed, mesh, args, ranges), lemmas, trials, seed, limits))


def capture(
    sequential: Callable[..., Any],
    distributed: Callable[..., Any],
    *,
    mesh: Mapping[str, int],
    args: Sequence[Any],
    ranges: Mapping[str, Range] | None = None,
) -> Captured:
    """The graphs of two functions: the sequential one, every rank's, and the input relation."""
    return functions(sequential, distributed, mesh, args, ranges).capture()
