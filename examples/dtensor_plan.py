"""torch.distributed.tensor: a plain module and the plan that distributes it, verified as modules, with all gradients.

Where each parameter lies is read from its DTensor placements.
"""

import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import graphguard as gg

BATCH, SEQUENCE, HIDDEN, WIDTH = 2, 4, 8, 16


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate, self.up = nn.Linear(HIDDEN, WIDTH), nn.Linear(HIDDEN, WIDTH)
        self.down = nn.Linear(WIDTH, HIDDEN)

    def forward(self, x):
        h = self.norm(x)
        return self.down(F.silu(self.gate(h)) * self.up(h))


TENSOR_PARALLEL = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
WITH_SEQUENCE = {
    "": PrepareModuleInput(input_layouts=gg.Replicate(), desired_input_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "gate": ColwiseParallel(input_layouts=Shard(1)),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(),
}


def loss(model, x, target):
    return F.mse_loss(model(x), target)


def verify(plan):
    tokens = gg.Input((BATCH, SEQUENCE, HIDDEN))
    return gg.verify_model(
        sequential=FeedForward,
        distributed=lambda mesh: parallelize_module(FeedForward(), mesh["tp"], plan),
        step=gg.train_step(loss),
        mesh={"tp": 2},
        inputs={"x": tokens, "target": tokens},
    )


@gg.check
def tensor_parallel():
    return verify(TENSOR_PARALLEL)


@gg.check
def with_sequence():
    return verify(WITH_SEQUENCE)
