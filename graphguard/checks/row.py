"""A row of a check with parameters: the values that it is called with, and how they are named."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any

from graphguard.errors import UsageError

MOST_ROWS = 10_000  # of one check; more are a slip of the pen
_PLAIN = re.compile(r"[A-Za-z0-9_.+-]{1,40}")  # what can stand in a name, and be typed in a shell


@dataclass(frozen=True)
class Row:
    """label: `tp=2,layers=1`; empty for a check without parameters."""

    values: Mapping[str, Any]
    label: str = ""

    def arguments(self) -> dict[str, Any]:
        """For one call. What the call does to them is not seen by another row, whose name would lie."""
        return {name: fresh(value) for name, value in self.values.items()}


WITHOUT = Row({})  # parameters


def rows_of(parameters: Mapping[str, Any]) -> tuple[Row, ...]:
    """One for each combination of values, the last parameter changing fastest."""
    given = {name: _values(name, values) for name, values in parameters.items()}
    count = math.prod(map(len, given.values()))
    if count > MOST_ROWS:
        raise UsageError(f"@gg.check gives {count} combinations of values; write at most {MOST_ROWS}, in several checks")
    named = [[(_label(name, place, value), value) for place, value in enumerate(values)] for name, values in given.items()]
    return tuple(
        Row(dict(zip(given, (value for _, value in chosen), strict=True)), ",".join(label for label, _ in chosen))
        for chosen in product(*named)
    )


def fitting(function: Callable[..., Any], parameters: Mapping[str, Any], name: str) -> None:
    """Refuse parameters that the function does not take."""
    if not parameters:
        return
    try:
        inspect.signature(function).bind_partial(**dict.fromkeys(parameters))
    except ValueError:  # a builtin has no signature
        return
    except TypeError as error:
        raise UsageError(f"@gg.check gives {name} parameters that it does not take: {error}") from None


def _values(name: str, values: Any) -> list[Any]:
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise UsageError(f"@gg.check({name}=...) is {type(values).__name__}; write a list of the values that it takes in turn")
    if not len(values):
        raise UsageError(f"@gg.check({name}=...) has no values, so nothing would run; write at least one")
    return [fresh(value) for value in values]


def fresh(value: Any) -> Any:
    """With dicts and lists of its own; other objects are the user's."""
    if type(value) is dict:
        return {key: fresh(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(fresh, value))
    return set(value) if type(value) is set else value


# ---------------------------------------------------------------------- names
def _label(name: str, place: int, value: Any) -> str:
    if type(value) is dict and value:
        said = [(key if isinstance(key, str) and _PLAIN.fullmatch(key) else None, _said(item)) for key, item in value.items()]
        if all(key and item for key, item in said):
            return ",".join(f"{key}={item}" for key, item in said)
    text = _said(value)
    return f"{name}={text}" if text else f"{name}{place}"


def _said(value: Any) -> str | None:
    """The value in a word, if there is one for it."""
    if isinstance(value, Enum):
        text = value.name
    elif value is None or isinstance(value, str | bool | int | float):
        text = str(value)
    elif f"{type(value).__module__}.{type(value).__name__}" == "torch.dtype":  # torch is not imported for it
        text = str(value).removeprefix("torch.")
    else:
        text = str(getattr(value, "__name__", ""))
    return text if _PLAIN.fullmatch(text) else None
