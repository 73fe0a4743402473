"""Numbers that may differ from rank to rank. A lane number is an int, or one int per lane; it is an int wherever all agree."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, TypeAlias

import numpy as np

Lanes: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Lane: TypeAlias = int | Lanes


def collapse(number: Lane) -> Lane:
    """The int that all lanes agree on, or the vector."""
    if type(number) is int:
        return number
    if isinstance(number, np.ndarray) and number.ndim:
        return int(number[0]) if (number == number[0]).all() else number
    return int(number)


def everywhere(condition: bool | np.bool_ | np.ndarray[Any, np.dtype[np.bool_]]) -> bool:
    """Whether a comparison of lane numbers holds in every lane."""
    return condition if type(condition) is bool else bool(np.all(condition))


def equal(a: Lane, b: Lane) -> bool:
    if type(a) is int and type(b) is int:
        return a == b
    return bool(np.all(a == b))


def varies(number: Lane) -> bool:
    return isinstance(number, np.ndarray)


def larger(a: Lane, b: Lane) -> Lane:
    if type(a) is int and type(b) is int:
        return max(a, b)
    return collapse(np.maximum(a, b))


def smaller(a: Lane, b: Lane) -> Lane:
    if type(a) is int and type(b) is int:
        return min(a, b)
    return collapse(np.minimum(a, b))


def at_lane(number: Lane, lane: int) -> int:
    return int(number[lane]) if isinstance(number, np.ndarray) else number


def kinds(numbers: Iterable[Lane]) -> tuple[list[int], Lanes]:
    """Lanes in which all numbers are the same are of one kind: the first lane of each kind, and by lane its kind. Ranks are
    many, and their kinds are few."""
    held = [number for number in numbers if isinstance(number, np.ndarray)]
    if not held:
        return [0], np.zeros(1, dtype=np.int64)
    _, first, kind = np.unique(np.stack(held), axis=1, return_index=True, return_inverse=True)
    return first.tolist(), kind.reshape(-1)


def take(number: Lane, lanes: Lanes) -> Lane:
    """The number that each lane reads when it looks at lane `lanes[l]`."""
    return collapse(number[lanes]) if isinstance(number, np.ndarray) else number


def key(number: Lane) -> Hashable:
    """Equal for equal numbers."""
    return number.tobytes() if isinstance(number, np.ndarray) else number
