"""Which versions of libraries the adapters were tested with."""

from __future__ import annotations

import importlib.metadata
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder

# By the name under which a library is installed. A library without an adapter is run as it is, in any version.
TESTED = {"torch": "2.13.0", "megatron-core": "0.16.1", "deepspeed": "0.19.8"}
_MODULES = {"torch": "torch", "megatron-core": "megatron.core", "deepspeed": "deepspeed"}


def check_version(recorder: Recorder, library: str) -> None:
    """What an adapter takes for granted when it meets a version that it does not know."""
    statement = _untested(library)
    if statement is not None:
        recorder.assume(statement)


def is_tested(library: str) -> bool:
    return _untested(library) is None


def warn_of_versions() -> None:
    """Once, before the ranks are forked. What a program imports later is only in the assumptions."""
    for library, module in _MODULES.items():
        statement = _untested(library) if module in sys.modules else None
        if statement is not None:
            warnings.warn(f"taken for granted: {statement}", stacklevel=2)


def _untested(library: str) -> str | None:
    version = importlib.metadata.version(library).split("+")[0]
    if version == TESTED[library]:
        return None
    return f"{library} {version} behaves as {TESTED[library]}, with which its adjustments were tested"
