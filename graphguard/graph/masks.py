"""Whether a program masks scores by a large negative number, in the place of minus infinity."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from graphguard.graph.ir import Graph

_FROM = -1000.0


def masks_by_numbers(graph: Graph) -> bool:
    """A guess, by the numbers that operations are given: it decides only what is tried."""
    numbers = (arg for node in graph.nodes for arg in _numbers((node.args, *node.kwargs.values())))
    return any(math.isfinite(number) and number <= _FROM for number in numbers)


def _numbers(arg: Any) -> Iterable[float]:
    if isinstance(arg, (tuple, list)):
        for each in arg:
            yield from _numbers(each)
    elif isinstance(arg, (int, float)) and not isinstance(arg, bool):
        yield arg
