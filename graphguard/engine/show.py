"""Relations in print: clean expressions, and types such as `f32[8, 64@tp]`."""

from __future__ import annotations

from graphguard.arrangement import Arrangement
from graphguard.engine.proof import Relation
from graphguard.engine.relate import Held, Placements
from graphguard.ir import SHORT_DTYPES

MOST_RANKS = 4  # written out; more are folded by axis


def relation_of(path: str, placements: Placements, output: Held, tensor: tuple[str, tuple[int, ...]]) -> Relation:
    named = tuple(zip(output.mesh.names, placements, strict=True))
    note = None
    if any(p.startswith("Partial") for p in placements):
        note = f"{path} is a sum over ranks, as it is where a reduction is missing; state outputs= to make that a fault"
    return Relation(path, f"{path} = {_expression(path, named, output)}", named, _type(named, output, tensor), note)


def arranged_relation(path: str, arrangement: Arrangement) -> Relation:
    note = f"{path} is made of tiles that no placement says: state outputs= to make that a fault"
    return Relation(path, f"{path} = {arrangement.rebuilt(path)}", note=note, arrangement=arrangement)


def _expression(path: str, named: tuple[tuple[str, str], ...], output: Held) -> str:
    work = [
        (axis, placement, size)
        for (axis, placement), size in zip(named, output.mesh.shape, strict=True)
        if placement != "Replicate"
    ]
    copies = 1
    for (_, placement), size in zip(named, output.mesh.shape, strict=True):
        copies *= size if placement == "Replicate" else 1
    suffix = ""
    if copies > 1:
        suffix = f"   (equal on all {copies} ranks)" if copies == output.mesh.size else f"   ({copies} equal copies)"
    if not work:
        return f"rank{output.order[0]}.{path}{suffix}"
    if len(work) == 1 and work[0][2] <= MOST_RANKS:
        axis, placement, size = work[0]
        members = [_rank_at(output, {axis: place}) for place in range(size)]
        return f"{_operation(placement, [f'rank{rank}.{path}' for rank in members])}{suffix}"
    text = f"rank.{path}"
    for axis, placement, _ in reversed(work):
        text = _operation(placement, [f"{text} over {axis}"])
    return text + suffix


def _rank_at(output: Held, place: dict[str, int]) -> int:
    number = 0
    for name, size in output.mesh.axes:
        number = number * size + place.get(name, 0)
    return output.order[number]


def _operation(placement: str, operands: list[str]) -> str:
    joined = ", ".join(operands)
    if placement.startswith("Shard("):
        return f"concat({joined}, dim={placement[6:-1]})"
    kind = placement[8:-1]
    return f"{ {'sum': 'sum', 'avg': 'mean'}.get(kind, kind) }({joined})"


def _type(named: tuple[tuple[str, str], ...], output: Held, tensor: tuple[str, tuple[int, ...]]) -> str:
    dtype, shape = tensor
    dims = [str(size) for size in shape]
    for axis, placement in named:
        if placement.startswith("Shard("):
            dims[int(placement[6:-1])] += f"@{axis}"
    partial = [axis for axis, placement in named if placement.startswith("Partial")]
    text = f"{SHORT_DTYPES.get(dtype, dtype)}[{', '.join(dims)}]"
    return text + (f" partial@{','.join(partial)}" if partial else "")
