"""What executing the programs would cost, estimated from shapes alone, and how much is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from graphguard.graph.ir import Graph, Node
from graphguard.graph.limits import Stops
from graphguard.graph.rank_class import RankClass

_PER_NODE, _PER_ELEMENT, _PER_PRODUCT = 40e-6, 2e-9, 0.4e-9  # seconds, in float64, on one slow core
_PER_TRIAL = 5e-3  # whatever it executes
_MULTIPLIES = ("mm", "matmul", "linear", "attention", "convolution", "einsum")


class Cost(NamedTuple):
    bytes: int
    seconds: float  # of one trial


def cost(graphs: Sequence[Graph]) -> Cost:
    size, seconds = 0, 0.0
    for graph in graphs:
        size += sum(8 * value.numel for value in graph.values())
        seconds += sum(_seconds(node) for node in graph.nodes)
    return Cost(size, seconds)


def cost_of_classes(sequential: Graph, classes: Sequence[RankClass]) -> Cost:
    """What it costs to execute every rank of some classes, though none is written out yet."""
    size, seconds = cost([sequential])
    for each in classes:
        its = cost([each.relation, each.graph])
        size, seconds = size + each.lanes * its.bytes, seconds + each.lanes * its.seconds
    return Cost(size, seconds)


def _seconds(node: Node) -> float:
    elements = sum(value.numel for value in node.outputs) + sum(value.numel for value in node.operands())
    products = _products(node) if any(word in node.op for word in _MULTIPLIES) else 0
    return _PER_NODE + _PER_ELEMENT * elements + _PER_PRODUCT * products


def _products(node: Node) -> float:
    """An upper estimate: of a product of matrices [.., m, k] and [.., k, n] it is m·k·n for each."""
    sizes = sorted((value.numel for value in [*node.operands(), *node.outputs]), reverse=True)[:3]
    return math.sqrt(math.prod(sizes)) if len(sizes) == 3 else sum(sizes)


def affordable(needed: Cost, trials: int, stops: Stops) -> tuple[int, str | None]:
    """How many of the trials can be afforded; none, and why, where not even one can."""
    limits = stops.limits
    if stops.over("trial_bytes", needed.bytes):
        return 0, f"its tensors would need {needed.bytes / 2**30:.1f} GB, more than {limits.trial_bytes / 2**30:.0f} GB"
    if stops.over("trial_seconds", math.ceil(needed.seconds)):
        return 0, f"a trial would take about {needed.seconds:.0f} s, more than {limits.trial_seconds} s"
    return max(1, min(trials, int(limits.trial_seconds / (needed.seconds + _PER_TRIAL)))), None
