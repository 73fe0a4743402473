"""Which line of the user's files an equation comes from."""

from __future__ import annotations

import os
from itertools import islice
from typing import Any

from jax._src import source_info_util

import graphguard
from graphguard.graph.ir import Source

_OURS = os.path.dirname(graphguard.__file__) + os.sep
_LIBRARIES = tuple(os.sep + name + os.sep for name in ("flax", "optax", "equinox", "haiku", "chex", "einops"))
MOST_CALLERS = 5  # lines of the user's that led to an equation, the nearest one included


def source_of(equation: Any) -> Source | None:
    """The nearest line first; lines of libraries for JAX only where there is no other."""
    frames = [frame for frame in source_info_util.user_frames(equation.source_info.traceback) if _leads(frame.file_name)]
    own = [frame for frame in frames if not any(name in frame.file_name for name in _LIBRARIES)]
    source: Source | None = None
    for frame in reversed(list(islice(own or frames, MOST_CALLERS))):
        source = Source(frame.file_name, frame.start_line, frame.function_name, source)
    return source


def is_backward(equation: Any) -> bool:
    return "transpose(" in str(equation.source_info.name_stack)


def _leads(file: str) -> bool:
    """Whether a line is the program's: what runs it, GraphGuard or a test runner, is above it."""
    return (
        not file.startswith((_OURS, "<frozen"))
        and os.sep + "_pytest" + os.sep not in file
        and os.sep + "pluggy" + os.sep not in file
    )
