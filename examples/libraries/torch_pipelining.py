"""torch.distributed.pipelining: the library's own schedules, a stage per layer; the loss and every gradient."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage, schedules

import graphguard as gg

WIDTH, MICROBATCHES = 4, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self, numbers):
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Layer() for number in numbers})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def loss_fn(y, target):
    return (y - target).pow(2).mean()


def whole_loss(model, x, target):
    return loss_fn(model(x), target)


def step_of(schedule, count, loss_fn=loss_fn, order=1, **options):
    def step(model, x, target):
        if not dist.is_initialized():
            return gg.train_step(whole_loss)(model, x=x, target=target)
        target = torch.cat(target.chunk(MICROBATCHES)[::order])
        stages = [PipelineStage(layer, int(number), count, torch.device("cpu")) for number, layer in model.layers.items()]
        looped = issubclass(schedule, schedules.PipelineScheduleMulti)
        run = schedule(stages if looped else stages[0], MICROBATCHES, loss_fn=loss_fn, **options)
        first, last = "0" in model.layers, str(count - 1) in model.layers
        losses = []
        run.step(*([x] if first else []), **({"target": target, "losses": losses} if last else {}))
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return {"loss": torch.stack(losses).mean().detach() if losses else None, "grads": gradients}

    return step


def verify(schedule, ranks=2, layers=2, **options):
    batch = gg.Input((4, WIDTH))
    return gg.verify_model(
        sequential=lambda: Stack(range(layers)),
        distributed=lambda mesh: Stack(range(mesh.get_rank(), layers, ranks)),
        step=step_of(schedule, layers, **options),
        mesh={"pp": ranks},
        inputs={"x": batch, "target": batch},
    )


@gg.check
def gpipe():
    return verify(schedules.ScheduleGPipe)


@gg.check
def one_forward_one_backward():
    return verify(schedules.Schedule1F1B)


@gg.check
def interleaved():
    return verify(schedules.ScheduleInterleaved1F1B, layers=4)


# ---------------------------------------------------------------------- faults
@gg.check(expect="refuted")
def gradients_of_microbatches_are_added_unscaled():
    return verify(schedules.Schedule1F1B, scale_grads=False)


@gg.check(expect="refuted")
def loss_is_divided_by_the_microbatches():
    """The schedule divides the gradients by them already."""
    return verify(schedules.ScheduleGPipe, loss_fn=lambda y, target: loss_fn(y, target) / MICROBATCHES)


@gg.check(expect="refuted")
def targets_of_other_microbatches():
    return verify(schedules.Schedule1F1B, order=-1)
