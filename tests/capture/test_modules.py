"""Modules: parameters become inputs, buffers keep their values, and building a module leaves no trace."""

import pytest
import torch
from harness import copies, random_inputs
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphguard as gg
from graphguard.errors import UsageError
from graphguard.oracle.replay import replay, replay_joint

INPUTS = {"x": gg.Input((2, 4), dtype=torch.float64)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8, dtype=torch.float64)
        self.down = nn.Linear(8, 4, dtype=torch.float64)
        self.register_buffer("scale", 1.0 / (10.0 ** torch.arange(4, dtype=torch.float64)))

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) * self.scale


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.float64)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def loss_fn(model, x):
    return model(x).pow(2).sum()


def parallelize(mesh):
    return parallelize_module(Net(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def weights_of(module):
    return {f"params.{name}": p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("build", [Net, Tied])
def test_a_train_step_replays_as_eager(build):
    captured = gg.capture_model(build, lambda mesh: build(), mesh=1, inputs=INPUTS, step=gg.train_step(loss_fn))
    module, given = build(), random_inputs(INPUTS)
    got = replay(captured.sequential, {**copies(given), **weights_of(module)})
    loss = loss_fn(module, **given)
    loss.backward()
    assert torch.equal(got.pop("loss"), loss.detach())
    assert list(got) == [f"grads.{name}" for name, _ in module.named_parameters()]
    for name, parameter in module.named_parameters():
        assert torch.equal(got[f"grads.{name}"], parameter.grad)


def test_the_default_step_calls_the_module():
    captured = gg.capture_model(Net, lambda mesh: Net(), mesh=1, inputs=INPUTS)
    module, given = Net(), random_inputs(INPUTS)
    assert torch.equal(replay(captured.sequential, {**given, **weights_of(module)})["out"], module(**given).detach())


def test_parameters_are_inputs_and_their_initialisation_is_gone():
    graph = gg.capture_model(Net, lambda mesh: Net(), mesh=1, inputs=INPUTS).sequential
    assert list(graph.inputs) == ["x", "params.up.weight", "params.up.bias", "params.down.weight", "params.down.bias"]
    assert not [node for node in graph.nodes if "uniform" in node.op]
    assert "aten.arange" in str(graph), "the buffer's value follows from its construction"


def test_a_tied_parameter_is_one_input():
    graph = gg.capture_model(Tied, lambda mesh: Tied(), mesh=1, inputs=INPUTS).sequential
    assert [name for name in graph.inputs if "weight" in name] == ["params.a.weight"]


def test_sharded_parameters_say_which_tensor_they_are_part_of():
    captured = gg.capture_model(Net, parallelize, mesh={"tp": 2}, inputs=INPUTS, step=gg.train_step(loss_fn))
    graph = captured.ranks[1]
    assert not captured.sequential.input_layouts
    layouts = {name: (layout.shape, layout.placements) for name, layout in graph.input_layouts.items()}
    assert layouts["params.up.weight"] == ((8, 4), ("Shard(dim=0)",)) and graph.inputs["params.up.weight"].shape == (4, 4)
    assert layouts["params.down.weight"] == ((4, 8), ("Shard(dim=1)",))
    assert layouts["params.down.bias"] == ((4,), ("Replicate()",))
    assert "input params.up.weight = %1: f64[4, 4]  # part of (8, 4): Shard(dim=0)" in str(graph).replace(
        f"%{graph.inputs['params.up.weight'].id}", "%1"
    )


def test_sharded_train_step_has_the_gradients_of_the_whole_module():
    captured = gg.capture_model(Net, parallelize, mesh={"tp": 2}, inputs=INPUTS, step=gg.train_step(loss_fn))
    module, given = Net(), random_inputs(INPUTS)
    whole = weights_of(module)
    ranks = []
    for rank, graph in enumerate(captured.ranks):
        shards = dict(given)
        for name, layout in graph.input_layouts.items():
            shards[name] = _part(whole[name], layout.placements[0], rank)
        ranks.append(shards)
    loss_fn(module, **given).backward()
    for rank, outputs in enumerate(replay_joint(captured.joint, ranks)):
        for name, parameter in module.named_parameters():
            layout = captured.ranks[rank].layouts[f"grads.{name}"]
            torch.testing.assert_close(outputs[f"grads.{name}"], _part(parameter.grad, layout.placements[0], rank))


def _part(tensor, placement, rank):
    return tensor if placement == "Replicate()" else tensor.chunk(2, int(placement[-2]))[rank]


def test_communication_that_only_built_the_module_is_left_out_and_said_to_be():
    def synced(mesh):
        net = Net()
        for parameter in net.parameters():
            torch.distributed.broadcast(parameter.data, 0)
        return net

    captured = gg.capture_model(Net, synced, mesh=2, inputs=INPUTS)
    assert not captured.joint.matches
    assert [text for text in captured.assumptions if "while the module was built" in text]
    plain = gg.capture_model(Net, lambda mesh: Net(), mesh=2, inputs=INPUTS)
    assert not plain.assumptions


def test_a_constructor_that_builds_no_module_is_refused():
    with pytest.raises(UsageError, match="sequential= returned int, not a module"):
        gg.capture_model(lambda: 3, lambda mesh: Net(), mesh=1, inputs=INPUTS)
    with pytest.raises(UsageError, match="sequential= is int, not a function that builds a module"):
        gg.capture_model(3, lambda mesh: Net(), mesh=1, inputs=INPUTS)
