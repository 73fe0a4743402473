"""Which tensors of a program are seen in its outputs, element by element: if one of their elements were undefined, some element
of an output would be.

A division by zero that a mask takes away, or a slice leaves out, does not make a program undefined; nor does one whose infinity
a sigmoid makes 0 or 1. So what a program divides by, or takes roots of, is known not to be zero, or negative, only where the
result is exposed. An operation that is not listed hides what it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum

from graphguard.graph.ir import Arg, Graph, Node, Value, values_in
from graphguard.graph.operators import KEEPS, KEEPS_FIRST, SHOWS, name_of

SPLITS = frozenset({"chunk", "split", "split_with_sizes", "unbind", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"})
ATTENTION = frozenset({"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
                       "_scaled_dot_product_flash_attention", "scaled_dot_product_attention"})  # fmt: skip


# Of the step of an optimizer, how many lists all count for the parameters: what is nan in them, and what is infinite.
STEPS = {"_fused_adam": (4, 3), "_fused_adamw": (4, 3), "_fused_sgd": (2, 2)}


class Shown(IntEnum):
    """What an output shows of the elements of a tensor that are undefined."""

    NOTHING = 0
    NAN = 1
    ALL = 2  # what is infinite as well


class Exposure:
    """What the outputs of a graph show of each of its tensors."""

    def __init__(self, graph: Graph):
        self._seen = {level: _seen(graph, level) for level in (Shown.NAN, Shown.ALL)}

    def of(self, node: Node) -> Shown:
        """What is seen of a node's result. Whole numbers are always defined: where there is none, the operation raises."""
        if not any(map(_is_float, node.outputs)):
            return Shown.ALL
        return max((level for level, seen in self._seen.items() if _is_seen(node, seen)), default=Shown.NOTHING)


def _is_seen(node: Node, seen: set[Value]) -> bool:
    """Whether what is undefined in a node is seen. Of lists, and of a step of an optimizer, all new tensors have to be."""
    new = len(node.args[0]) if _name(node) in STEPS and isinstance(node.args[0], tuple) else 1
    return bool(node.outputs) and all(value in seen for value in node.outputs[: None if _is_of_lists(node) else new])


def _seen(graph: Graph, level: Shown) -> set[Value]:
    found = {value for value in graph.outputs.values() if value is not None}
    cut: dict[tuple[Value, int], list[tuple[int, int]]] = {}  # the exposed slices of tensors, by dim
    for node in reversed(graph.nodes):
        found.update(_passed(node, found, level))
        for value, dim, low, high in _slices(node, found):
            cut.setdefault((value, dim), []).append((low, high))
            if _is_whole(cut[value, dim], value.shape[dim]):
                found.add(value)
    return found


def _passed(node: Node, found: set[Value], level: Shown) -> Iterator[Value]:
    """The operands of which every element is seen in the results that are."""
    name = _name(node)
    if name in SPLITS:
        if all(value in found for value in node.outputs):
            yield from values_in(node.args[:1])
    elif (
        _is_seen(node, found)
        and all(map(_shows_all, node.outputs if _is_of_lists(node) else node.outputs[:1]))
        and not _scales_by_nothing(node.kwargs)
    ):
        if name in (SHOWS if level == Shown.NAN else KEEPS):
            written = {name.partition(".")[0] for name in node.writes}  # what memory held before it is seen nowhere
            yield from values_in(node.args)
            yield from values_in(arg for key, arg in node.kwargs.items() if key not in written)
        elif name in STEPS:
            yield from values_in(node.args[: STEPS[name][level == Shown.ALL]])
        elif _passes_first(name, node, level):
            yield from values_in(node.args[:1])


def _name(node: Node) -> str:
    """The operator, or the one that is taken of each in a list."""
    return name_of(node.op).removeprefix("_foreach_")


def _is_of_lists(node: Node) -> bool:
    return node.op.startswith("aten._foreach_")


def _passes_first(name: str, node: Node, level: Shown) -> bool:
    if name == "pow":
        return len(node.args) > 1 and _is_power(node.args[1], level)
    return name in (ATTENTION if level == Shown.NAN else KEEPS_FIRST)


def _shows_all(value: Value) -> bool:
    """Whether what is undefined has an element, and a number, to be seen as."""
    return _is_float(value) and 0 not in value.shape


def _is_float(value: Value) -> bool:
    return value.dtype.startswith(("float", "bfloat", "complex"))


def _is_power(exponent: Arg, level: Shown) -> bool:
    """Whether the exponent is a number other than zero: anything to the power of zero is one, and infinity to one below is
    zero."""
    return isinstance(exponent, (int, float)) and (exponent > 0 or (exponent < 0 and level == Shown.NAN))


def _scales_by_nothing(kwargs: Mapping[str, Arg]) -> bool:
    """Whether an operand is left out, as with beta=0."""
    return any(kwargs.get(name) == 0 for name in ("alpha", "beta"))


def _slices(node: Node, found: set[Value]) -> Iterator[tuple[Value, int, int, int]]:
    """Of which tensor a node gives which elements of a dim, if they are seen."""
    if name_of(node.op) not in ("slice", "select") or node.outputs[0] not in found:
        return
    value, *rest = node.args
    dim = rest[0] if rest else 0
    assert isinstance(value, Value) and isinstance(dim, int)
    dim, size = dim % len(value.shape), value.shape[dim]
    if name_of(node.op) == "select":
        low = rest[1] % size if isinstance(rest[1], int) else size
        yield value, dim, low, low + 1
        return
    ends = [*rest[1:3], None, None][:2]
    low, high = (_end(end, otherwise, size) for end, otherwise in zip(ends, (0, size), strict=True))
    if len(rest) < 4 or rest[3] == 1:
        yield value, dim, low, high


def _end(end: Arg, otherwise: int, size: int) -> int:
    if not isinstance(end, int):
        return otherwise
    return max(0, end + size) if end < 0 else min(end, size)


def _is_whole(spans: list[tuple[int, int]], size: int) -> bool:
    reached = 0
    for low, high in sorted(spans):
        if low > reached:
            return False
        reached = max(reached, high)
    return reached >= size
