"""Relations in print: clean expressions."""

from __future__ import annotations

from graphguard.engine.proof import Relation
from graphguard.engine.relate.outputs import Held
from graphguard.graph.placement import Partial, Placements, Replicate, Shard, has_partial, type_text
from graphguard.relation.arrangement import Arrangement

MOST_RANKS = 4  # written out; more are folded by axis


def relation_of(path: str, placements: Placements, output: Held, tensor: tuple[str, tuple[int, ...]]) -> Relation:
    note = None
    if has_partial(placements):
        note = f"{path} is a sum over ranks, as it is where a reduction is missing; state outputs= to make that a fault"
    named = tuple(zip(output.mesh.names, map(str, placements), strict=True))
    text = f"{path} = {_expression(path, placements, output)}"
    return Relation(path, text, named, type_text(*tensor, output.mesh, placements), note)


def arranged_relation(path: str, arrangement: Arrangement) -> Relation:
    note = f"{path} is made of tiles that no placement says: state outputs= to make that a fault"
    return Relation(path, f"{path} = {arrangement.rebuilt(path)}", note=note, arrangement=arrangement)


def _expression(path: str, placements: Placements, output: Held) -> str:
    work, copies = [], 1
    for (axis, size), placement in zip(output.mesh.axes, placements, strict=True):
        if isinstance(placement, Replicate):
            copies *= size
        else:
            work.append((axis, placement, size))
    suffix = ""
    if copies > 1:
        suffix = f"   (equal on all {copies} ranks)" if copies == output.mesh.size else f"   ({copies} equal copies)"
    if not work:
        return f"rank{output.order[0]}.{path}{suffix}"
    if len(work) == 1 and work[0][2] <= MOST_RANKS:
        axis, placement, size = work[0]
        members = [output.order[output.mesh.rank_at({axis: place})] for place in range(size)]
        return f"{_operation(placement, [f'rank{rank}.{path}' for rank in members])}{suffix}"
    text = f"rank.{path}"
    for axis, placement, _ in reversed(work):
        text = _operation(placement, [f"{text} over {axis}"])
    return text + suffix


def _operation(placement: Shard | Partial, operands: list[str]) -> str:
    joined = ", ".join(operands)
    if isinstance(placement, Shard):
        return f"concat({joined}, dim={placement.dim})"
    return f"{'mean' if placement.reduce == 'avg' else placement.reduce}({joined})"
