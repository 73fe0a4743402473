"""Numbers that may differ from rank to rank. A lane number is an int, or one int per lane; it is an int wherever all agree."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeAlias

import numpy as np

Lanes: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Lane: TypeAlias = int | Lanes


def collapse(number: Lane) -> Lane:
    """The int that all lanes agree on, or the vector."""
    if isinstance(number, np.ndarray) and (number == number[0]).all():
        return int(number[0])
    return number


def everywhere(condition: bool | np.bool_ | np.ndarray[Any, np.dtype[np.bool_]]) -> bool:
    """Whether a comparison of lane numbers holds in every lane."""
    return bool(np.all(condition))


def equal(a: Lane, b: Lane) -> bool:
    return everywhere(a == b)


def varies(number: Lane) -> bool:
    return isinstance(number, np.ndarray)


def at_lane(number: Lane, lane: int) -> int:
    return int(number[lane]) if isinstance(number, np.ndarray) else number


def take(number: Lane, lanes: Lanes) -> Lane:
    """The number that each lane reads when it looks at lane `lanes[l]`."""
    return collapse(number[lanes]) if isinstance(number, np.ndarray) else number


def key(number: Lane) -> Hashable:
    """Equal for equal numbers."""
    return tuple(number.tolist()) if isinstance(number, np.ndarray) else number
