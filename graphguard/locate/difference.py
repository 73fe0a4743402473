"""How a tensor of the ranks differs from what it should have been, where that can be said in a few words."""

from __future__ import annotations

import math
from fractions import Fraction

import torch

from graphguard.graph.ir import Node, Value
from graphguard.locate.first_wrong import Suspects
from graphguard.locate.intended import Intended, Step, Tensors, is_close

_MOST_STARTS = 4096  # places where a part of a tensor is looked for


def difference_of(wanted: Intended, step: Step) -> str | None:
    """Of the first wrong place on the way to an output."""
    held, parts = wanted.held(step.lanes), step.want.parts
    if step.want.groups:
        return None
    wrong = [rank for rank, part in parts.items() if rank in held and not is_close(held[rank], part)]
    if not wrong:
        return None
    alone = f", on rank {wrong[0]} alone" if len(wrong) == 1 < len(parts) else ""
    if step.summed:
        return "each rank has a summand of it, and nothing sums them"
    factor = _factor({rank: held[rank] for rank in wrong}, parts)
    if factor is not None:
        return f"it is {factor} times what it should be{alone}"
    return _another(wanted, step, held, wrong[0], alone)


def _factor(held: Tensors, parts: Tensors) -> Fraction | None:
    rank = next(iter(held))
    if any(not t.is_floating_point() or t.shape != parts[r].shape for r, t in held.items()):
        return None
    sizes = [float(tensor.abs().sum()) for tensor in (held[rank], parts[rank])]
    if not all(math.isfinite(size) and size > 0 for size in sizes):
        return None
    number = sizes[0] / sizes[1]
    sign = 1 if is_close(held[rank], number * parts[rank]) else -1
    if not all(is_close(tensor, sign * number * parts[r]) for r, tensor in held.items()):
        return None
    simple = Fraction(sign * number).limit_denominator(64)
    return simple if abs(float(simple) - sign * number) < 1e-9 * number else None


def _another(wanted: Intended, step: Step, held: Tensors, rank: int, alone: str) -> str | None:
    """Another sequential tensor, or another part of the same one."""
    suspects, at = wanted.suspects, (rank, step.lanes[rank])
    origin = suspects.origin(at) if suspects.tells(at) else None
    meant = step.want.owner
    if origin is None or origin.owner is None or origin.summed or meant is None or origin.factor != 1:
        return None
    if suspects.known.owner_of.get(meant) != origin.owner:
        here, there = _named(suspects, suspects.value_of(origin.owner)), _named(suspects, meant)
        return f"it is {here} where {there} is meant{alone}" if here and there and here != there else None
    whole = suspects.trial.sequential.values[meant]
    mine, its = _span(whole, held[rank]), _span(whole, step.want.parts[rank])
    if mine is None or its is None or mine == its or mine[0] != its[0]:
        return None
    return f"it has {mine[1]}:{mine[2]} of dim {mine[0]} where {its[1]}:{its[2]} is meant, on rank {rank}"


def _named(suspects: Suspects, value: Value | None) -> str | None:
    """A sequential tensor, by the name of its input or the line that makes it."""
    name = next((name for name, each in suspects.sequential.inputs.items() if each is value), None)
    if name is not None:
        return f"the sequential {name}"
    maker: Node | None = next((node for node in suspects.sequential.nodes if value in node.outputs), None)
    what = "gradient" if maker is not None and maker.backward else "result"
    return f"the sequential {what} of {maker.source}" if maker is not None and maker.source is not None else None


def _span(whole: torch.Tensor, part: torch.Tensor) -> tuple[int, int, int] | None:
    """As which slice of one dim a tensor is part of another: dim, first, end."""
    if part.dim() != whole.dim():
        return None
    dims = [dim for dim in range(whole.dim()) if part.shape[dim] != whole.shape[dim]]
    if len(dims) != 1 or part.shape[dims[0]] > whole.shape[dims[0]]:
        return None
    (dim,), size = dims, part.shape[dims[0]]
    for start in range(min(whole.shape[dim] - size + 1, _MOST_STARTS)):
        if is_close(whole.narrow(dim, start, size), part):
            return dim, start, start + size
    return None
