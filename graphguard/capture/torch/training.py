"""`gg.train_step`: a step that differentiates a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from graphguard.capture.torch.wrappers import gradients_of
from graphguard.errors import UsageError


@dataclass(frozen=True)
class train_step:
    """A step that differentiates `loss_fn(model, **inputs)`: returns `loss` and `grads.<parameter name>`.

    `loss` is the expected relation of the loss, as in `outputs=`.
    """

    loss_fn: Callable[..., torch.Tensor]
    loss: Any = None

    def __call__(self, model: torch.nn.Module, **inputs: Any) -> dict[str, Any]:
        loss = self.loss_fn(model, **inputs)
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"the loss_fn of gg.train_step returned {type(loss).__name__}; it must return a scalar tensor")
        if loss.numel() != 1:
            raise UsageError(
                f"the loss_fn of gg.train_step returned a tensor of shape {tuple(loss.shape)}; it must be a scalar"
            )
        loss.backward()
        return {"loss": loss.detach(), "grads": gradients_of(model)}
