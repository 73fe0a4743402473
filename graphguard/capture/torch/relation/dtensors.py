"""Outputs that are DTensors: each stands for its full tensor, by its own placements on its own mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from graphguard.capture.front import Captured
from graphguard.capture.torch.relation.layouts import by_rank, has_sums, part_of, placements_on, text_of
from graphguard.errors import UsageError
from graphguard.graph.ir import Layout, Mesh
from graphguard.graph.placement import REPLICATE, read
from graphguard.relation.expectation import Need


def of_dtensors(captured: Captured, mesh: Mesh) -> dict[str, Any]:
    """What outputs that are DTensors say of themselves, as `outputs=` has it."""
    expected: dict[str, Any] = {}
    for path, layouts in _layouts(captured):
        known = [layout for layout in layouts if layout is not None]
        if _is_another(captured, path, known) is not None or _lacks_parts(captured, path, known):
            continue
        placements = placements_on(mesh, layouts)
        if placements is None and has_sums(known):
            raise UsageError(
                f"output {path!r} is a DTensor placed by {text_of(known[0])} on a mesh of its own; "
                "state outputs= for it, or return its full tensor"
            )
        expected[path] = part_of(path, layouts, mesh) if placements is None else placements
    return expected


def needed_parts(captured: Captured) -> dict[str, list[Need]]:
    """Of every part of a DTensor, some rank of its mesh that has it must return it."""
    needs: dict[str, list[Need]] = {}
    for path, layouts in _layouts(captured):
        parts = {ranks: None for layout in layouts if layout is not None for ranks in _sharing(layout)}
        needs[path] = [Need(ranks, _lacking(ranks)) for ranks in parts]
    return needs


def other_shapes(captured: Captured) -> dict[str, str]:
    """DTensors that stand for a tensor of another shape than the sequential output's."""
    found = {}
    for path, layouts in _layouts(captured):
        why = _is_another(captured, path, [layout for layout in layouts if layout is not None])
        if why is not None:
            found[path] = why
    return found


def _layouts(captured: Captured) -> Iterator[tuple[str, list[Layout | None]]]:
    for path, value in captured.sequential.outputs.items():
        layouts = by_rank(captured, lambda graph, path=path: graph.layouts.get(path))  # type: ignore[misc]
        if value is not None and any(layout is not None for layout in layouts):
            yield path, layouts


def _is_another(captured: Captured, path: str, layouts: list[Layout]) -> str | None:
    value = captured.sequential.outputs[path]
    assert value is not None
    shape = next((layout.shape for layout in layouts if layout.shape != value.shape), None)
    if shape is None:
        return None
    return f"it is a DTensor that stands for a tensor of shape {shape}, and the sequential output has shape {value.shape}"


def _lacks_parts(captured: Captured, path: str, layouts: list[Layout]) -> bool:
    parts = {ranks for layout in layouts for ranks in _sharing(layout)}
    returned = captured.returning(path)
    return any(not any(returned[rank] for rank in ranks) for ranks in parts)


def _sharing(layout: Layout) -> list[tuple[int, ...]]:
    """The ranks of a DTensor's mesh, those that have the same part of it together."""
    mesh = Mesh(tuple((str(axis), size) for axis, size in enumerate(layout.mesh_shape)))
    parts: dict[tuple[int, ...], list[int]] = {}
    for position, rank in enumerate(layout.mesh_ranks):
        place = mesh.coordinate(position).values()
        own = tuple(at for at, placement in zip(place, layout.placements, strict=True) if read(placement) != REPLICATE)
        parts.setdefault(own, []).append(rank)
    return [tuple(ranks) for ranks in parts.values()]


def _lacking(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has a part of this DTensor alone, and does not return it"
    return f"the ranks {', '.join(map(str, ranks))} have a part of this DTensor alone, and do not return it"
