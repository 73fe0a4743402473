"""deepspeed: the engine that `initialize` makes of a model (ZeRO stage 0), a step of SGD: the loss and every weight.

Tested with deepspeed 0.19.8.
"""

import os
from contextlib import nullcontext

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before the import, which looks for devices

import deepspeed
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import graphguard as gg

WIDTH, RATE = 4, 0.5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def engine_with(**options):
    def build(mesh):
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": {"stage": 0},
                  "optimizer": {"type": "SGD", "params": {"lr": RATE}}, **options}  # fmt: skip
        model = Net()
        return deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))[0]

    return build


def step_of(loss_fn=F.mse_loss, synchronised=True):
    def step(model, x, target):
        if dist.is_initialized():
            with nullcontext() if synchronised else model.no_sync():
                loss = loss_fn(model(x), target)
                model.backward(loss)
            (model if synchronised else model.optimizer).step()
            model = model.module
        else:
            loss = F.mse_loss(model(x), target)
            loss.backward()
            torch.optim.SGD(model.parameters(), lr=RATE).step()
        return {"loss": loss.detach(), "after": {name: parameter.detach() for name, parameter in model.named_parameters()}}

    return step


def verify(step, build):
    batch = gg.Input((4, WIDTH), gg.Shard(0))
    names = [f"after.{name}" for name, _ in Net().named_parameters()]
    return gg.verify_model(
        sequential=Net,
        distributed=build,
        step=step,
        mesh={"dp": 2},
        inputs={"x": batch, "target": batch},
        outputs={"loss": gg.Partial("avg"), **dict.fromkeys(names, gg.Replicate())},
    )


@gg.check
def engine():
    return verify(step_of(), engine_with())


# ---------------------------------------------------------------------- faults
@gg.check(expect="refuted")
def gradients_are_not_synchronised():
    return verify(step_of(synchronised=False), engine_with())


@gg.check(expect="refuted")
def gradients_are_clipped():
    """To a norm of 1, which is deepspeed's default."""
    return verify(step_of(), engine_with(gradient_clipping=1.0))


@gg.check(expect="refuted")
def loss_is_divided_by_the_ranks():
    """The gradients are averaged already."""

    def divided(output, target):
        return F.mse_loss(output, target) / dist.get_world_size()

    return verify(step_of(divided), engine_with())
