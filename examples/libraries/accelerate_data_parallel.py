"""accelerate: a model that its Accelerator prepares for several processes; the mean loss of the ranks, and every gradient.

Tested with accelerate 1.15.0.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator

import graphguard as gg

WIDTH = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def step_of(synchronised=True, quiet=False, **options):
    def step(model, x, target):
        if not dist.is_initialized():
            return gg.train_step(lambda model: F.mse_loss(model(x), target))(model)
        accelerator = Accelerator(cpu=True, **options)
        prepared = accelerator.prepare_model(model) if synchronised else model
        with accelerator.no_sync(prepared) if quiet else nullcontext():
            loss = F.mse_loss(prepared(x), target)
            accelerator.backward(loss)
        return {"loss": loss.detach(), "grads": {name: parameter.grad for name, parameter in model.named_parameters()}}

    return step


def verify(step):
    batch = gg.Input((4, WIDTH), gg.Shard(0))
    names = [f"grads.{name}" for name, _ in Net().named_parameters()]
    return gg.verify_model(
        sequential=Net,
        distributed=lambda mesh: Net(),
        step=step,
        mesh={"dp": 2},
        inputs={"x": batch, "target": batch},
        outputs={"loss": gg.Partial("avg"), **dict.fromkeys(names, gg.Replicate())},
    )


@gg.check
def prepared_model():
    return verify(step_of())


# ---------------------------------------------------------------------- faults
@gg.check(expect="refuted")
def model_is_not_prepared():
    return verify(step_of(synchronised=False))


@gg.check(expect="refuted")
def loss_is_divided_for_steps_that_are_not_taken():
    """The loss is divided by the number of steps that gradients are gathered over, and one step is taken."""
    return verify(step_of(gradient_accumulation_steps=2))


@gg.check(expect="refuted")
def last_microbatch_is_not_synchronised():
    """Gradients are gathered over microbatches without communication; in the last of them it must come."""
    return verify(step_of(quiet=True))
