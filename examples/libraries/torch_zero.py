"""torch's ZeroRedundancyOptimizer over DistributedDataParallel: the loss, and every parameter after two steps."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import graphguard as gg

WIDTH = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def optimizer_of(model, kind, **options):
    if not dist.is_initialized():
        return kind(model.parameters(), **options)
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, **options)


def step_of(kind, options, rank_options=None, scale=1.0, steps=2):
    """What the ranks alone have, options or a scale of the loss, is a fault."""

    def step(model, x, target):
        ranks = dist.is_initialized()
        optimizer = optimizer_of(model, kind, **options, **((rank_options or {}) if ranks else {}))
        for _ in range(steps):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), target)
            if ranks:
                loss = loss * scale
            loss.backward()
            optimizer.step()
        module = model.module if ranks else model
        return {"loss": loss.detach(), "after": dict(module.named_parameters())}

    return step


def verify(step, wrapped=DistributedDataParallel):
    batch = gg.Input((4, WIDTH), gg.Shard(0))
    names = [f"after.{name}" for name, _ in Net().named_parameters()]
    return gg.verify_model(
        sequential=Net,
        distributed=lambda mesh: wrapped(Net()),
        step=step,
        mesh={"dp": 2},
        inputs={"x": batch, "target": batch},
        outputs={"loss": gg.Partial("avg"), **dict.fromkeys(names, gg.Replicate())},
    )


@gg.check
def sgd_with_momentum():
    return verify(step_of(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}))


@gg.check
def adam():
    return verify(step_of(torch.optim.AdamW, {"lr": 0.1}))


# ---------------------------------------------------------------------- faults
@gg.check(expect="refuted")
def loss_is_scaled_on_the_ranks():
    return verify(step_of(torch.optim.SGD, {"lr": 0.1}, scale=2.0, steps=1))


@gg.check(expect="refuted")
def weights_decay_on_the_ranks_alone():
    return verify(step_of(torch.optim.SGD, {"lr": 0.1}, {"weight_decay": 0.5}, steps=1))


@gg.check(expect="refuted")
def gradients_are_not_synchronised():
    """Each rank steps with the gradients of its own part of the batch."""

    def alone(module):
        model = DistributedDataParallel(module)
        model.require_backward_grad_sync = False
        return model

    return verify(step_of(torch.optim.SGD, {"lr": 0.1}, steps=1), alone)
