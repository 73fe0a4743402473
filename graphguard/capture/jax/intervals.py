"""Between which numbers the elements of a whole-number tensor lie: by how it is made, by what is stated of inputs, and by what
is assumed. It decides whether an index may leave its range."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from graphguard.capture.jax.builder import Builder
from graphguard.capture.jax.dtypes import is_whole
from graphguard.graph.ir import Node, Value
from graphguard.graph.rank_class import PerRank


class Interval(NamedTuple):
    """Both ends belong to it."""

    low: float = -math.inf
    high: float = math.inf

    def meet(self, other: Interval) -> Interval:
        return Interval(max(self.low, other.low), min(self.high, other.high))

    def join(self, other: Interval) -> Interval:
        return Interval(min(self.low, other.low), max(self.high, other.high))

    def plus(self, other: Interval) -> Interval:
        return Interval(self.low + other.low, self.high + other.high)

    def minus(self, other: Interval) -> Interval:
        return self.plus(Interval(-other.high, -other.low))

    def within(self, low: float, high: float) -> bool:
        return low <= self.low and self.high <= high


ALL = Interval()
_KEEPS = {"view", "expand", "permute", "slice", "select", "flip", "clone", "index_select", "gather", "embedding", "repeat"}
_AT_MOST = {"lt": -1, "le": 0, "eq": 0}  # x op c: how far above c x may be
_AT_LEAST = {"gt": 1, "ge": 0, "eq": 0}
_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}


class Intervals:
    def __init__(self, builder: Builder):
        self._build = builder
        self._said: dict[Value, Interval] = {}
        self._found: dict[Value, Interval] = {}

    def say(self, value: Value, low: float, high: float) -> None:
        """What is stated, or assumed, of a tensor."""
        self._said[value] = self.of(value).meet(Interval(low, high))
        self._found.clear()

    def of(self, value: Value) -> Interval:
        if value not in self._found:
            made = self._of_node(value) if is_whole(value.dtype) else ALL
            self._found[value] = made.meet(self._said.get(value, ALL))
        return self._found[value]

    def _of_node(self, value: Value) -> Interval:
        constant = self._build.constants.get(value)
        if constant is not None:
            numbers = np.frombuffer(constant.data, dtype=constant.dtype)
            return Interval(int(numbers.min()), int(numbers.max())) if numbers.size else ALL
        node = self._build.made.get(value)
        if node is None or not node.op.startswith("aten."):
            return ALL
        name = node.op.split(".")[1]
        rule = _RULES.get(name)
        if rule is not None:
            return rule(self, node, value)
        return self.of(_operand(node)) if name in _KEEPS else ALL

    # ------------------------------------------------------------------ masks
    def under(self, value: Value, mask: Value, holds: bool) -> Interval:
        """The elements of a tensor at which a mask of its own shape holds, or does not."""
        return self.of(value).meet(self._implied(value, mask, holds))

    def chosen(self, value: Value, mask: Value, holds: bool) -> Interval:
        """The same; of a sum with a number, also by what the mask says of the other summand."""
        node = self._build.made.get(value)
        found = self.under(value, mask, holds)
        if node is not None and node.op == "aten.add.Tensor" and isinstance(node.args[1], int):
            found = found.meet(self.under(_operand(node), mask, holds).plus(_interval(node.args[1])))
        return found

    def _implied(self, value: Value, mask: Value, holds: bool) -> Interval:
        node = self._build.made.get(mask)
        if node is None:
            return ALL
        name = node.op.split(".")[1]
        if name == "bitwise_not":
            return self._implied(value, _operand(node), not holds)
        if name == "bitwise_and" and holds and isinstance(node.args[1], Value):
            return self._implied(value, _operand(node), holds).meet(self._implied(value, node.args[1], holds))
        if node.op.endswith(".Scalar") and self._uncast(_operand(node)) is self._uncast(value):
            name = name if holds else _OPPOSITE.get(name, "")
            bound = _interval(node.args[1])
            return Interval(
                bound.low + _AT_LEAST[name] if name in _AT_LEAST else -math.inf,
                bound.high + _AT_MOST[name] if name in _AT_MOST else math.inf,
            )
        return ALL

    def decided(self, mask: Value) -> bool | None:
        """Whether a comparison of whole numbers holds everywhere, or nowhere; None if that is not known."""
        node = self._build.made.get(mask)
        name = "" if node is None else node.op.split(".")[1]
        if node is None or not mask.numel:
            return None
        if name in ("view", "expand", "permute", "all", "any"):
            return self.decided(_operand(node))
        if name == "bitwise_not":
            settled = self.decided(_operand(node))
            return None if settled is None else not settled
        if name in ("bitwise_and", "bitwise_or") and isinstance(node.args[1], Value):
            both = [self.decided(each) for each in (_operand(node), node.args[1])]
            ends = name == "bitwise_or"  # what one of them alone decides
            return ends if ends in both else None if None in both else not ends
        if not node.op.endswith(".Scalar") or not is_whole(_operand(node).dtype):
            return None
        mine = self.of(_operand(node))
        for holds in (True, False):
            left = mine.meet(self._implied(_operand(node), mask, holds))
            if left.low > left.high:
                return not holds
        return None

    def _uncast(self, value: Value) -> Value:
        node = self._build.made.get(value)
        while (
            node is not None and node.op == "aten._to_copy.default" and is_whole(_operand(node).dtype) and is_whole(value.dtype)
        ):
            value = _operand(node)
            node = self._build.made.get(value)
        return value


# ---------------------------------------------------------------------- operators
def _operand(node: Node) -> Value:
    found = node.args[0]
    assert isinstance(found, Value)
    return found


def _interval(arg: Any) -> Interval:
    """Of a number, or of one per rank."""
    if isinstance(arg, PerRank):
        return Interval(int(arg.numbers.min()), int(arg.numbers.max()))
    return Interval(arg, arg) if isinstance(arg, (int, float)) and not math.isnan(arg) else ALL


def _argument(all_: Intervals, arg: Any) -> Interval:
    return all_.of(arg) if isinstance(arg, Value) else _interval(arg)


def _clamp(all_: Intervals, node: Node, value: Value) -> Interval:
    low, high = (math.nan if arg is None else arg for arg in (*node.args[1:], None)[:2])
    if node.op != "aten.clamp.default" or not isinstance(low, int) or not isinstance(high, int) or low > high:
        return ALL
    mine = all_.of(_operand(node))
    return Interval(min(max(mine.low, low), high), max(min(mine.high, high), low))


def _bounded(bound: Callable[[Interval, float], Interval]) -> Callable[[Intervals, Node, Value], Interval]:
    def rule(all_: Intervals, node: Node, value: Value) -> Interval:
        number = node.args[1]
        return bound(all_.of(_operand(node)), number) if isinstance(number, int) else ALL

    return rule


def _copy(all_: Intervals, node: Node, value: Value) -> Interval:
    source = _operand(node)
    if source.dtype == "bool":
        return Interval(0, 1)
    return all_.of(source) if is_whole(source.dtype) else ALL


def _where(all_: Intervals, node: Node, value: Value) -> Interval:
    mask, yes, no = node.args
    assert isinstance(mask, Value) and isinstance(yes, Value) and isinstance(no, Value)
    return all_.chosen(yes, mask, True).join(all_.chosen(no, mask, False))


def _sum(all_: Intervals, node: Node, value: Value) -> Interval:
    return all_.of(_operand(node)).plus(_argument(all_, node.args[1]))


def _difference(all_: Intervals, node: Node, value: Value) -> Interval:
    return all_.of(_operand(node)).minus(_argument(all_, node.args[1]))


def _product(all_: Intervals, node: Node, value: Value) -> Interval:
    mine, its = all_.of(_operand(node)), _argument(all_, node.args[1])
    if not all(map(math.isfinite, (*mine, *its))):
        return ALL
    ends = [a * b for a in mine for b in its]
    return Interval(min(ends), max(ends))


def _places(all_: Intervals, node: Node, value: Value) -> Interval:
    """Positions that were found along a dim; `sort` and `topk` give them second."""
    if len(node.outputs) > 1 and value is node.outputs[0]:
        return all_.of(_operand(node))
    dim = node.args[1] if node.op.startswith("aten.arg") else node.kwargs.get("dim")
    return Interval(0, _operand(node).shape[dim] - 1) if isinstance(dim, int) else ALL


def _remainder(all_: Intervals, node: Node, value: Value) -> Interval:
    mine, by = all_.of(_operand(node)), node.args[1]
    if not isinstance(by, int) or by <= 0:
        return ALL
    return Interval(0 if mine.low >= 0 else 1 - by, by - 1)


def _quotient(all_: Intervals, node: Node, value: Value) -> Interval:
    mine, by = all_.of(_operand(node)), node.args[1]
    if not isinstance(by, int) or by <= 0 or mine.low < 0:
        return ALL
    return Interval(0, mine.high // by if math.isfinite(mine.high) else math.inf)


def _joined(all_: Intervals, node: Node, value: Value) -> Interval:
    parts = node.args[0]
    assert isinstance(parts, tuple)
    found = [all_.of(part) for part in parts if isinstance(part, Value)]
    return Interval(min(each.low for each in found), max(each.high for each in found))


def _masked(all_: Intervals, node: Node, value: Value) -> Interval:
    by = node.args[1]
    return Interval(0, by) if isinstance(by, int) and by >= 0 else ALL


_RULES: dict[str, Callable[[Intervals, Node, Value], Interval]] = {
    "_to_copy": _copy,
    "clamp": _clamp,
    "clamp_min": _bounded(lambda mine, number: Interval(max(mine.low, number), max(mine.high, number))),
    "clamp_max": _bounded(lambda mine, number: Interval(min(mine.low, number), min(mine.high, number))),
    "where": _where,
    "add": _sum,
    "sub": _difference,
    "mul": _product,
    "full": lambda all_, node, value: _interval(node.args[1]),
    "arange": lambda all_, node, value: Interval(0, value.shape[0] - 1),
    **dict.fromkeys(("argmax", "argmin", "sort"), _places),
    "fmod": _remainder,
    **dict.fromkeys(("cat", "stack"), _joined),
    "bitwise_and": _masked,
    "div": _quotient,
}
