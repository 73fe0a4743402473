"""A step of training with clipping and accumulation, of a small network on one process and as a library does it on replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from graphguard.api import Input, verify_model
from graphguard.report.report import Report

WIDTH, RATE, NORM = 4, 0.5, 0.25
Outputs = dict[str, Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return result


@dataclass(frozen=True)
class Plan:
    """What the step does: `microbatches` whose gradients are gathered, clipping to NORM, and the optimizer with its options."""

    microbatches: int = 1
    clipped: bool = False
    optimizer: str = "SGD"
    options: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        words = [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        words += ["clipped"] if self.clipped else []
        named = [f"{name} {value:g}" for name, value in self.options]
        words += [" ".join([self.optimizer, *named])] if named or self.optimizer != "SGD" else []
        return ", ".join(words) or "plain"

    def parts(self, x: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return zip(x.chunk(self.microbatches), target.chunk(self.microbatches), strict=True)

    def made(self, parameters: Any) -> torch.optim.Optimizer:
        given: dict[str, Any] = dict(self.options)
        made: torch.optim.Optimizer = getattr(torch.optim, self.optimizer)(parameters, lr=RATE, **given)
        return made


PLANS = tuple(Plan(microbatches, clipped) for microbatches in (1, 2) for clipped in (False, True))
MORE_PLANS = (
    Plan(options=(("momentum", 0.5),)), Plan(options=(("weight_decay", 0.25),)), Plan(optimizer="AdamW"),
    Plan(2, True, "AdamW"),
)  # fmt: skip


def alone(model: nn.Module, plan: Plan, x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    """One process. Returns the losses of the microbatches."""
    optimizer, losses = plan.made(model.parameters()), []
    for part, wanted in plan.parts(x, target):
        losses.append(F.mse_loss(model(part), wanted))
        (losses[-1] / plan.microbatches).backward()
    if plan.clipped:
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
    optimizer.step()
    return losses


def weights_of(model: nn.Module) -> Outputs:
    return {name: each.detach() for name, each in model.named_parameters()}


def verify_training(
    plan: Plan, ranks: Callable[[nn.Module, Plan, torch.Tensor, torch.Tensor], list[torch.Tensor]], dp: int,
    weights: Callable[[nn.Module], Outputs] = weights_of,
) -> Report:  # fmt: skip
    """ranks: the step of the library, which returns the losses of the rank's microbatches. weights: the model's, afterwards."""

    def step(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> Outputs:
        losses = (ranks if dist.is_initialized() else alone)(model, plan, x, target)
        return {"loss": sum(each.detach() for each in losses) / plan.microbatches, "after": weights(model)}

    def dealt(full: torch.Tensor, coord: Any) -> torch.Tensor:
        """Each rank has its rows of each microbatch."""
        parts = [each.chunk(dp)[coord["dp"]] for each in full.chunk(plan.microbatches)]
        return torch.cat(parts)

    rows = (2 * dp * plan.microbatches, WIDTH)
    batch = Input(rows, Shard(0)) if plan.microbatches == 1 else Input(rows, local=dealt)
    names = [f"after.{name}" for name, _ in Net().named_parameters()]
    return verify_model(
        sequential=Net,
        distributed=lambda mesh: Net(),
        step=step,
        mesh={"dp": dp},
        inputs={"x": batch, "target": batch},
        outputs={"loss": Partial("avg"), **dict.fromkeys(names, Replicate())},
    )
