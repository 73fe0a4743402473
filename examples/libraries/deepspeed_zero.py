"""deepspeed: ZeRO stages 1 to 3, a step of SGD: the loss and every weight.

The engine is made within the step: `initialize` copies the weights into flat buffers, and they are inputs of the check.
Tested with deepspeed 0.19.8.
"""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before the import, which looks for devices

import deepspeed
import deepspeed.runtime.zero.stage3  # imported once, not in every rank
import deepspeed.runtime.zero.stage_1_and_2
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed_data_parallel import RATE, WIDTH, Net

import graphguard as gg

BUCKETS = {"reduce_bucket_size": 256, "allgather_bucket_size": 256, "stage3_prefetch_bucket_size": 64,
           "stage3_param_persistence_threshold": 0}  # fmt: skip


def engine_of(model, stage, decay=0.0, clip=0.0):
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": clip, "zero_optimization": {"stage": stage, **BUCKETS},
        "optimizer": {"type": "SGD", "params": {"lr": RATE, "weight_decay": decay}}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    return deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))[0]


def step_of(stage, loss_fn=F.mse_loss, **options):
    def step(model, x, target):
        if dist.is_initialized():
            engine = engine_of(model, stage, **options)
            loss = loss_fn(engine(x), target)
            engine.backward(loss)
            engine.step()
        else:
            loss = F.mse_loss(model(x), target)
            loss.backward()
            torch.optim.SGD(model.parameters(), lr=RATE).step()
        parameters = dict(model.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=stage == 3 and dist.is_initialized()):
            return {"loss": loss.detach(), "after": {name: each.detach().clone() for name, each in parameters.items()}}

    return step


def verify(step):
    batch = gg.Input((4, WIDTH), gg.Shard(0))
    names = [f"after.{name}" for name, _ in Net().named_parameters()]
    return gg.verify_model(
        sequential=Net,
        distributed=lambda mesh: Net(),
        step=step,
        mesh={"dp": 2},
        inputs={"x": batch, "target": batch},
        outputs={"loss": gg.Partial("avg"), **dict.fromkeys(names, gg.Replicate())},
    )


@gg.check
def stage_1():
    return verify(step_of(1))


@gg.check
def stage_2():
    return verify(step_of(2))


@gg.check
def stage_3():
    return verify(step_of(3))


# ---------------------------------------------------------------------- faults
@gg.check(expect="refuted")
def loss_is_divided_by_the_ranks():
    """Stage 1. The gradients are averaged already."""

    def divided(output, target):
        return F.mse_loss(output, target) / dist.get_world_size()

    return verify(step_of(1, divided))


@gg.check(expect="refuted")
def weights_decay_on_the_ranks_alone():
    return verify(step_of(2, decay=0.25))


@gg.check(expect="refuted")
def gradients_are_clipped():
    """Stage 3. To a norm of 1, which is deepspeed's default."""
    return verify(step_of(3, clip=1.0))
