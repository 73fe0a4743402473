"""Why an operation loses the relation of its operands, in one sentence, where the way that the ranks hold them tells."""

from __future__ import annotations

from collections.abc import Sequence

from graphguard.engine.listing import short
from graphguard.holding import Holding
from graphguard.ir import Node

# Operators that keep sums: of one operand (all others whole), and of all operands at once.
_LINEAR = {
    "mm", "bmm", "matmul", "mul", "div", "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "sum",
    "mean", "neg", "detach", "alias", "clone", "_to_copy", "unsqueeze", "squeeze", "slice", "select", "split", "dot", "mv",
    "cat",
    "index_select", "gather", "embedding_dense_backward", "slice_backward", "select_backward", "where", "copy",
    "cumsum", "einsum",
}  # fmt: skip
_SUMS = {"add", "sub", "addmm", "baddbmm", "add_", "sub_"}
_PRODUCTS = {"mm", "bmm", "matmul", "mul", "dot", "mv"}


def law_at(node: Node, operands: Sequence[Holding]) -> str | None:
    """The law that an operation breaks on operands that are summands; None where nothing can be told."""
    name = short(node.op)
    partial = [each for each in operands if each.summed_axes]
    if node.communicates or not partial:
        return None
    axes = ", ".join(dict.fromkeys(axis for each in partial for axis in each.summed_axes))
    if name in _SUMS:
        whole = next((each for each in operands if not each.summed_axes), None)
        if whole is not None:
            return (
                f"{partial[0].name} is only a summand over {axes} on each rank and {whole.name} is whole: "
                f"after the sum, {whole.name} counts once per rank"
            )
        return None
    if name in _PRODUCTS and len(partial) > 1:
        return f"both operands of {name} are summands over {axes}: the product of two sums is not the sum of the products"
    if name in _LINEAR:
        return None
    return f"{name} is not linear, so {name} of summands is no summand of the result: sum over {axes} before it"
