"""deepspeed: a step of its engine in each stage of ZeRO, with clipping and accumulation: the loss and every weight.

The engine is made within the step: `initialize` copies weights into flat buffers, and they are inputs of the check.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from graphguard.report.report import Report
from graphguard.sweep.candidate import Candidate
from graphguard.sweep.training import MORE_PLANS, NORM, PLANS, Outputs, Plan, verify_training

# Of the default sizes (5e8 elements) nothing could be executed.
_BUCKETS = {
    "reduce_bucket_size": 256, "allgather_bucket_size": 256, "stage3_prefetch_bucket_size": 64,
    "stage3_param_persistence_threshold": 0,
}  # fmt: skip
# By name: options of the engine, with those of ZeRO under "zero", and the stages that read them.
OPTIONS: Mapping[str, tuple[Mapping[str, Any], tuple[int, ...]]] = {
    "gradients divided first": ({"prescale_gradients": True}, (0, 1, 2)),
    "gradients divided twice": ({"prescale_gradients": True, "gradient_predivide_factor": 2.0}, (0, 1, 2)),
    "without reduce_scatter": ({"zero": {"reduce_scatter": False}}, (1, 2, 3)),
    "gradients where they are": ({"zero": {"contiguous_gradients": False}}, (1, 2, 3)),
    "small buckets": ({"zero": {"reduce_bucket_size": 8, "allgather_bucket_size": 8}}, (1, 2, 3)),
    "parameters kept": ({"zero": {"stage3_param_persistence_threshold": 1000}}, (3,)),
}


def candidates(sizes: tuple[int, ...], options: bool) -> Iterator[Candidate]:
    """Each stage with clipping and accumulation; if so asked, with more optimizers and options of the engine."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before the import, which looks for devices
    for module in ("deepspeed", "deepspeed.runtime.zero.stage3", "deepspeed.runtime.zero.stage_1_and_2"):
        import_module(module)  # once, and not in every rank
    for dp in sizes:
        for stage in range(4):
            for plan in (*PLANS, *MORE_PLANS) if options else PLANS:
                yield Candidate(f"ZeRO {stage}, {plan}", {"dp": dp}, partial(_verify, stage, plan, {}, dp))
        for name, (given, stages) in OPTIONS.items() if options else ():
            for stage in stages:
                yield Candidate(f"ZeRO {stage}, {name}", {"dp": dp}, partial(_verify, stage, Plan(), given, dp))


def _verify(stage: int, plan: Plan, options: Mapping[str, Any], dp: int) -> Report:
    def ranks(model: nn.Module, plan: Plan, x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        engine, losses = _engine(model, stage, plan, options), []
        for part, wanted in plan.parts(x, target):
            losses.append(F.mse_loss(engine(part), wanted))
            engine.backward(losses[-1])
            engine.step()
        return losses

    def weights(model: nn.Module) -> Outputs:
        import deepspeed

        parameters = dict(model.named_parameters())
        gathered = stage == 3 and dist.is_initialized()
        with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=gathered):
            return {name: each.detach().clone() for name, each in parameters.items()}

    return verify_training(plan, ranks, dp, weights)


def _engine(model: nn.Module, stage: int, plan: Plan, options: Mapping[str, Any]) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": plan.microbatches,
        "gradient_clipping": NORM if plan.clipped else 0.0,
        "zero_optimization": {"stage": stage, **_BUCKETS, **options.get("zero", {})},
        "zero_allow_untested_optimizer": True,
        **{name: value for name, value in options.items() if name != "zero"},
    }
    parameters = list(model.parameters())
    return deepspeed.initialize(model=model, config=config, optimizer=plan.made(parameters), model_parameters=parameters)[0]
