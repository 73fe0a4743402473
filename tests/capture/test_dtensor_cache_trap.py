"""A trap: DTensor's caches take two meshes of one layout for equal whatever the rank is, so that what was cached for one rank
is served to another. The loss comes out right and the gradients wrong."""

import pytest
import torch
import torch.distributed as dist
from harness import assert_same, capture_both, filled, random_inputs, rank_inputs
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from graphguard.capture.torch.relation.inputs import Input
from graphguard.capture.torch.world import ranks
from graphguard.oracle.replay import replay, replay_joint

WORLD = 4
F64 = torch.float64
INPUTS = {"x": Input((6, 8), dtype=F64), "w": Input((300,), dtype=F64)}


def train(module, x):
    loss = module(x).pow(2).sum()
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in module.named_parameters()}}


def network(w):
    return filled(nn.Sequential(nn.Linear(8, 12, dtype=F64), nn.Tanh(), nn.Linear(12, 8, dtype=F64)), w)


def sequential(x, w):
    return train(network(w), x)


def distributed(x, w, mesh):
    """In backward every rank cuts its own part out of a whole gradient, by the coordinate of the mesh that it is given."""
    gathered = ColwiseParallel(output_layouts=Replicate())
    outputs = train(parallelize_module(network(w), mesh, {"0": gathered, "2": gathered}), x)
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in outputs.items()}


@pytest.fixture
def rank_zero_was_here():
    """This process has run the program as rank 0, and its caches remember."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    distributed(**random_inputs(INPUTS), mesh=dist.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("world",)))
    dist.destroy_process_group()
    yield
    ranks.forget_other_ranks()


def replayed():
    captured = capture_both(sequential, distributed, WORLD, INPUTS)
    full = random_inputs(INPUTS)
    return replay(captured.sequential, full), replay_joint(captured.joint, rank_inputs(captured, full))


def test_ranks_are_captured_without_the_caches_of_another(rank_zero_was_here):
    expected, got = replayed()
    for rank, outputs in enumerate(got):
        assert_same(outputs, expected, who=f"rank {rank}")


def test_caches_of_another_rank_would_give_the_right_loss_and_wrong_gradients(rank_zero_was_here, monkeypatch):
    """Shows that the test above can fail."""
    monkeypatch.setattr(ranks, "forget_other_ranks", lambda: None)
    expected, got = replayed()
    for outputs in got:
        assert torch.allclose(outputs["loss"], expected["loss"])
        assert not torch.allclose(outputs["2.weight"], expected["2.weight"])
