"""NVIDIA-NeMo/Megatron-Bridge #6067: the callback that reduces gradients is set on a configuration that nobody reads.

The model keeps a deep copy of the configuration it was built with. What is installed afterwards on the original has no effect:
the training loop asks the model's copy, finds no callback, and steps with the gradients of each rank's own batch.
"""

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

BATCH, HIDDEN, LR = 8, 4, 0.1
BUG_LINE = "return w.detach() - LR * w.grad"


@dataclass
class Config:
    finalize_gradients: object = None


class Model:
    def __init__(self, config, w):
        self.config, self.w = copy.deepcopy(config), w.requires_grad_()

    def loss(self, x, y):
        return F.mse_loss(torch.tanh(x @ self.w), y)


def train(model, x, y):
    model.loss(x, y).backward()
    if model.config.finalize_gradients:
        model.config.finalize_gradients([model.w])
    return stepped(model.w)


def stepped(w):
    return w.detach() - LR * w.grad


def averaged(parameters):
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def sequential(x, y, w):
    return {"w": train(Model(Config(), w), x, y)}


def dp_fixed(x, y, w):
    config = Config(finalize_gradients=averaged)
    model = Model(config, w)
    return {"w": train(model, x, y)}


def dp_buggy(x, y, w):
    config = Config()
    model = Model(config, w)
    config.finalize_gradients = averaged
    return {"w": train(model, x, y)}


ROWS = gg.Input((BATCH, HIDDEN), Shard(0))
ARGS = {
    "mesh": {"dp": 2},
    "inputs": {"x": ROWS, "y": ROWS, "w": gg.Input((HIDDEN, HIDDEN))},
    "outputs": {"w": Replicate()},
}


@gg.check
def fixed():
    return gg.verify(sequential, dp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, dp_buggy, **ARGS)
