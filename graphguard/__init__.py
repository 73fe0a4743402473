"""GraphGuard: a static verifier for distributed deep learning.

    import graphguard as gg
    from graphguard import Shard, Replicate, Partial

Names are loaded when they are first used, so that importing the package is fast and needs neither torch nor jax.
"""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"
LOADED = time.time()  # what is changed after that is not what runs

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

    from graphguard.api import Input, capture_function, capture_model, lemma, train_step, verify, verify_model
    from graphguard.capture.torch.relation.made_parameters import Fused
    from graphguard.checks.check import Outcome, check
    from graphguard.checks.many import verify_many
    from graphguard.errors import CaptureError, GraphGuardError, InternalError, ProgramError, UsageError
    from graphguard.report.report import NotVerifiedError, Report

_HOMES = {
    "Input": "graphguard.capture.torch.relation.inputs",
    "Fused": "graphguard.capture.torch.relation.made_parameters",
    "Shard": "torch.distributed.tensor.placement_types",
    "Replicate": "torch.distributed.tensor.placement_types",
    "Partial": "torch.distributed.tensor.placement_types",
    "capture_function": "graphguard.api",
    "capture_model": "graphguard.api",
    "train_step": "graphguard.api",
    "verify": "graphguard.api",
    "verify_model": "graphguard.api",
    "lemma": "graphguard.api",
    "check": "graphguard.checks.check",
    "verify_many": "graphguard.checks.many",
    "Outcome": "graphguard.checks.check",
    "Report": "graphguard.report.report",
    "NotVerifiedError": "graphguard.report.report",
    "InternalError": "graphguard.errors",
    "GraphGuardError": "graphguard.errors",
    "UsageError": "graphguard.errors",
    "CaptureError": "graphguard.errors",
    "ProgramError": "graphguard.errors",
}

_NEED_TORCH = {"Fused", "Input", "capture_function", "capture_model", "lemma", "train_step", "verify", "verify_model"}

__all__ = [
    "CaptureError", "Fused", "GraphGuardError", "Input", "InternalError", "NotVerifiedError", "Outcome", "Partial",
    "ProgramError", "Replicate", "Report", "Shard", "UsageError",
    "capture_function", "capture_model", "check", "lemma", "train_step", "verify", "verify_many", "verify_model",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "jax":
        _require(name, "jax", "JAX")
        return importlib.import_module("graphguard.jax")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'graphguard' has no attribute {name!r}")
    if home.startswith("torch.") or name in _NEED_TORCH:
        _require(name, "torch", "PyTorch")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _require(name: str, module: str, title: str) -> None:
    import importlib.util

    if importlib.util.find_spec(module) is None:
        raise ImportError(f"graphguard.{name} needs {title}; install it with `pip install graphguard[{module}]`")
