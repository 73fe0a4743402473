"""What `GradScaler` does to gradients, in plain torch: its kernels look at values, and say in a number what they saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphguard.capture.torch.world.collectives import inlined


def unscaled(grads: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
    """Multiply gradients with a number; `found` becomes 1 if one of their elements is not finite."""
    for grad in grads:
        found.copy_(torch.where(grad.isfinite().all(), found, 1.0))
        grad.mul_(inverse.reshape(()))


def with_scale_updated(
    scale: torch.Tensor, tracker: torch.Tensor, found: torch.Tensor, growth: float, backoff: float, interval: int
) -> torch.Tensor:
    """A smaller scale after gradients that are not finite, a larger one after so many steps without. That the larger one is
    finite is not looked at: numbers do not overflow."""
    bad, steps = found != 0, tracker + 1
    full = steps == interval
    tracker.copy_(torch.where(bad.logical_or(full), 0, steps))
    return scale.copy_(torch.where(bad, scale * backoff, torch.where(full, scale * growth, scale)))


HANDLERS: dict[str, Callable[..., Any]] = {
    "aten._amp_foreach_non_finite_check_and_unscale_.default": inlined(unscaled),
    "aten._amp_update_scale_.default": inlined(with_scale_updated, returns=True),
}
