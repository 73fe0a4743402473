"""Numbers at which a program turns: what inputs are compared with, clamped to, or ignored for as labels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from graphguard.aten.kernels import Kernels
from graphguard.graph.ir import Graph, Node, Value
from graphguard.graph.operators import COMPARES, RESHAPES, name_of

_TURNS = COMPARES | {"clamp", "clamp_min", "clamp_max", "threshold_backward", "hardtanh"}
_LOSSES = {"nll_loss_forward": 4, "nll_loss2d_forward": 4, "nll_loss_backward": 5, "nll_loss2d_backward": 5}  # ignore_index
_COPIES = RESHAPES | {"copy", "cat", "stack", "constant_pad_nd"}
_MOST = 4  # of one input

Thresholds = dict[str, tuple[float, ...]]


def thresholds(graphs: Sequence[Graph], stated: Mapping[str, tuple[float | None, float | None]]) -> Thresholds:
    """By input, the numbers that graphs compare it with, inside of the range that is stated for it."""
    found: dict[str, dict[float, None]] = {}
    for graph in graphs:
        moved: dict[Value, str] = {value: name for name, value in graph.inputs.items()}
        for node in graph.nodes:
            names = [moved[value] for value in node.operands() if value in moved]
            if names and _only_moves(node):
                moved |= dict.fromkeys(node.outputs, names[0])
            for name in names:
                found.setdefault(name, {}).update(dict.fromkeys(_numbers(node)))
    return {name: _within(list(numbers), *stated.get(name, (None, None))) for name, numbers in found.items() if numbers}


def _within(numbers: list[float], low: float | None, high: float | None) -> tuple[float, ...]:
    return tuple(n for n in numbers if (low is None or low <= n) and (high is None or n < high))[:_MOST]


def _numbers(node: Node) -> Iterator[float]:
    name = name_of(node.op)
    if name in _LOSSES:
        ignored = node.args[_LOSSES[name]] if len(node.args) > _LOSSES[name] else None
        yield from [ignored] if isinstance(ignored, int) else []
    elif name in _TURNS:
        for arg in (*node.args, *node.kwargs.values()):
            if isinstance(arg, (int, float)) and not isinstance(arg, bool) and math.isfinite(arg):
                yield arg


def _only_moves(node: Node) -> bool:
    return node.op.startswith("aten.") and (name_of(node.op) in _COPIES or Kernels.function(node.op)[1].is_view)
