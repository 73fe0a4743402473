"""The same programs on fewer ranks, which can be executed where the mesh that was asked for is too much."""

from __future__ import annotations

from graphguard.capture.front import Captured
from graphguard.graph.ir import Mesh
from graphguard.graph.limits import Stops
from graphguard.oracle.budget import affordable, cost, cost_of_classes
from graphguard.oracle.limits import Limits
from graphguard.report.report import Report


def small_mesh(mesh: Mesh, captured: Captured, limits: Limits) -> Mesh | None:
    """On which to execute the programs in place of a mesh; None where there is no need, or where fewer ranks do not help."""
    of_all, of_one = cost_of_classes(captured.sequential, captured.held), cost([captured.sequential])
    ranks_cost_too_much = affordable(of_all, 1, Stops(limits))[1] is not None
    small = Mesh.of({name: _least_divisor(size) for name, size in mesh.axes})
    return small if ranks_cost_too_much and affordable(of_one, 1, Stops(limits))[1] is None and small != mesh else None


def _least_divisor(size: int) -> int:
    """A size that splits evenly what the given one does."""
    return next((each for each in range(2, size + 1) if size % each == 0), 1)


def told(mesh: Mesh, small: Report) -> str:
    """What the same programs are there, said of those that were asked for."""
    where = f"on the mesh {mesh}, where they can be executed, the same programs are {small.verdict}"
    if small.verdict != "refuted" or not small.findings:
        return where
    first = small.findings[0]
    return f"{where}: {first.message}{'' if first.distributed is None else f' ({first.distributed})'}"
