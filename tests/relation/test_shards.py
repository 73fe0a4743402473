"""Shards of unequal size, shards without elements, and DTensors whose placement no relation has a word for."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import graphguard as gg


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.inner, self.outer = nn.Linear(5, hidden), nn.Linear(hidden, 2)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


def error(model, x):
    return model(x).square().mean()


def halved_error(model, x):
    return error(model, x) / 2


def fully_sharded(hidden, loss=error, ranks=4):
    def sharded(mesh):
        model = Net(hidden)
        fully_shard(model, mesh=mesh)
        return model

    def step(model, x):
        return gg.train_step(loss if any(isinstance(p, DTensor) for p in model.parameters()) else error)(model, x=x)

    inputs = {"x": gg.Input((8, 5), Shard(0))}
    outputs = {"loss": {"dp": gg.Partial("avg")}}
    return gg.verify_model(lambda: Net(hidden), sharded, step=step, mesh={"dp": ranks}, inputs=inputs, outputs=outputs)


@pytest.mark.parametrize("hidden", [3, 6])
def test_fully_sharded_parameters_that_do_not_divide_are_proved(hidden):
    report = fully_sharded(hidden)
    assert report.verified, report
    assert report.relation["grads.inner.bias"].placements == (("dp", "Shard(0)"),)


def test_wrong_gradients_of_parameters_that_do_not_divide_are_refuted():
    assert fully_sharded(3, halved_error).verdict == "refuted"


def linear(x, w):
    return nn.functional.linear(x, w)


def split_linear(times):
    def program(x, w, mesh):
        return times * linear(distribute_tensor(x, mesh, [Replicate()]), distribute_tensor(w, mesh, [Shard(0)]))

    return program


@pytest.mark.parametrize(("times", "verdict"), [(1, "verified"), (2, "refuted")])
def test_dtensors_of_which_some_ranks_hold_nothing(times, verdict):
    inputs = {"x": gg.Input((8, 5)), "w": gg.Input((3, 5))}
    assert gg.verify(linear, split_linear(times), mesh={"tp": 4}, inputs=inputs).verdict == verdict


REDUCTIONS = {
    "product": lambda x: x.prod(0),
    "norm": torch.linalg.vector_norm,
    "total norm": lambda x: torch.nn.utils.get_total_norm([x, 2 * x]),
    "largest": lambda x: x.amax(1),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_dtensors_that_are_reduced_by_their_own_placements_stand_for_their_full_value(name):
    reduce = REDUCTIONS[name]

    def sharded(times):
        return lambda x, mesh: times * reduce(DTensor.from_local(x, mesh, [Shard(0)]))

    inputs = {"x": gg.Input((4, 3), Shard(0))}
    assert gg.verify(reduce, sharded(1), mesh={"tp": 2}, inputs=inputs).verified
    assert gg.verify(reduce, sharded(3), mesh={"tp": 2}, inputs=inputs).verdict == "refuted"
