"""Why an operation loses the relation of its operands, in one sentence, where the way that the ranks hold them tells."""

from __future__ import annotations

from collections.abc import Sequence

from graphguard.engine.relate.per_operation import short
from graphguard.graph.ir import Arg, Node
from graphguard.graph.operators import class_of, linear_in
from graphguard.graph.placement import REPLICATE, Placement, Shard
from graphguard.graph.tensor_layout import TensorLayout

_ADDED_PRODUCTS = {"addmm", "baddbmm"}
# Operators that need a dim whole, and the argument that names it; without it they need all dims.
_ALONG = {
    "_softmax": 1, "_log_softmax": 1, "cumsum": 1, "cumprod": 1, "logsumexp": 1, "argmax": 1, "argmin": 1, "sort": 1, "topk": 2,
    "var": 1, "std": 1, "var_mean": 1, "median": 1, "native_layer_norm": 1, "flip": 1, "roll": 2,
    "linalg_vector_norm": 2,
}  # fmt: skip


def law_at(node: Node, operands: Sequence[TensorLayout | None]) -> str | None:
    """The law that an operation breaks on operands that are summands or tiles; None where nothing can be told."""
    name = short(node.op)
    if node.communicates:
        return None
    partial = [each for each in operands if each is not None and each.summed_axes]
    if partial:
        return _of_summands(node, partial, operands)
    if name in _ADDED_PRODUCTS:
        return _of_added_product(operands)
    return _of_cut_dim(node, operands)


def _of_summands(node: Node, partial: Sequence[TensorLayout], operands: Sequence[TensorLayout | None]) -> str | None:
    name = short(node.op)
    axes = ", ".join(dict.fromkeys(axis for each in partial for axis in each.summed_axes))
    summed = {number for number, each in enumerate(operands) if each is not None and each.summed_axes}
    linear = linear_in(node.op, len(operands))
    if any(summed <= group for group in linear):
        whole = next((each for each in operands if each is not None and not each.summed_axes), None)
        is_sum = class_of(node.op) == "elementwise" and summed not in linear
        return _counted(partial[0].name, whole.name, axes) if is_sum and whole is not None else None
    if len(summed) > 1 and summed <= frozenset().union(*linear):
        return f"both operands of {name} are summands over {axes}: the product of two sums is not the sum of the products"
    return f"{name} is not linear, so {name} of summands is no summand of the result: sum over {axes} before it"


def _of_added_product(operands: Sequence[TensorLayout | None]) -> str | None:
    """A bias beside a product over a dim that is cut."""
    if len(operands) != 3 or operands[0] is None or operands[1] is None:
        return None
    bias, first = operands[0], operands[1]
    axes = _axes_of(first, len(first.shape) - 1)
    if not axes or any(_placement(bias, axis) != REPLICATE for axis in axes):
        return None
    return _counted("the product", bias.name, ", ".join(axes))


def _counted(summand: str, whole: str, axes: str) -> str:
    why = f"after the sum, {whole} counts once per rank"
    return f"{summand} is only a summand over {axes} on each rank and {whole} is whole: {why}"


def _of_cut_dim(node: Node, operands: Sequence[TensorLayout | None]) -> str | None:
    """A function along a dim of which each rank has a part."""
    place = _ALONG.get(short(node.op))
    if place is None or not operands or operands[0] is None:
        return None
    held = operands[0]
    for dim in _dims(node, node.args[place] if place < len(node.args) else None, len(held.shape)):
        axes = _axes_of(held, dim)
        if axes:
            whole, over = held.shape[dim], ", ".join(axes)
            return f"{short(node.op)} needs all {whole} of dim {dim}, and each rank has only its part of them over {over}"
    return None


def _dims(node: Node, named: Arg, rank: int) -> list[int]:
    if named is None:
        return list(range(rank))
    if short(node.op) == "native_layer_norm":
        return list(range(rank - len(named), rank)) if isinstance(named, tuple) else []
    return [dim % rank for dim in (named if isinstance(named, tuple) else (named,)) if isinstance(dim, int) and rank]


def _axes_of(holding: TensorLayout, dim: int) -> list[str]:
    """The axes that cut a dim."""
    named = zip(holding.mesh.axes, holding.placements, strict=True)
    return [axis for (axis, size), placement in named if placement == Shard(dim) and size > 1]


def _placement(holding: TensorLayout, axis: str) -> Placement:
    return dict(zip(holding.mesh.names, holding.placements, strict=True)).get(axis, REPLICATE)
