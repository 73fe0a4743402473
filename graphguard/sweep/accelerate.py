"""accelerate: a step with what its Accelerator prepares, with clipping and accumulation: the loss and every weight."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from graphguard.report.report import Report
from graphguard.sweep.candidate import Candidate
from graphguard.sweep.training import MORE_PLANS, NORM, PLANS, Plan, verify_training


def candidates(sizes: tuple[int, ...], options: bool) -> Iterator[Candidate]:
    """Clipping and accumulation; if so asked, with more optimizers."""
    import accelerate  # noqa: F401 - once, and not in every rank

    for dp in sizes:
        for plan in (*PLANS, *MORE_PLANS) if options else PLANS:
            yield Candidate(f"Accelerator, {plan}", {"dp": dp}, partial(_verify, plan, dp))


def _verify(plan: Plan, dp: int) -> Report:
    return verify_training(plan, _step, dp)


def _step(model: nn.Module, plan: Plan, x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    """As its users write it: the Accelerator divides losses, and knows which microbatch is the last."""
    from accelerate import Accelerator

    accelerator, losses = Accelerator(cpu=True, gradient_accumulation_steps=plan.microbatches), []
    prepared, optimizer = accelerator.prepare(model, plan.made(model.parameters()))
    for part, wanted in plan.parts(x, target):
        with accelerator.accumulate(prepared):
            losses.append(F.mse_loss(prepared(part), wanted))
            accelerator.backward(losses[-1])
            if plan.clipped and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), NORM)
            optimizer.step()
            optimizer.zero_grad()
    return losses
