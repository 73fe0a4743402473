"""Every operation has the path of the module that runs it, as `named_modules` has it; lines are equal in all modules."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from harness import capture_one
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import graphguard as gg
from graphguard.api import capture_function, capture_model
from graphguard.cache import codec
from graphguard.capture.front import ranks_apart
from graphguard.capture.torch.program import ModelProgram, call_model
from graphguard.capture.torch.session import capture_sequential
from graphguard.graph import json as graph_json
from graphguard.graph.alike import classes_of
from graphguard.graph.findings import Finding, Place
from graphguard.graph.ir import Source

X = {"x": gg.Input((4, 6))}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad + grad


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(6, 6)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def loss(model, x):
    return model(x).square().sum()


def captured(construct, step=None):
    return capture_sequential(ModelProgram(construct, step or gg.train_step(loss), "sequential"), X)


def modules(graph, op, backward=False):
    return [node.module for node in graph.nodes if node.op.startswith(f"aten.{op}.") and node.backward == backward]


def test_operations_have_the_path_of_the_innermost_module():
    graph = captured(Net)
    assert modules(graph, "addmm") == ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head"]
    assert modules(graph, "relu") == ["layers.0", "layers.1"]
    assert modules(graph, "add") == ["", ""]  # in the forward of the model itself


def test_lines_that_lead_to_an_operation_have_modules_of_their_own():
    graph = captured(Net)
    down = next(node for node in graph.nodes if node.module == "layers.1.down")
    assert [each.module for each in down.source.outwards()][:3] == ["layers.1.down", "", ""]


def test_gradients_have_the_path_of_the_module_whose_gradients_they_are():
    graph = captured(Net)
    assert list(dict.fromkeys(modules(graph, "mm", True))) == [
        "head", "layers.1.down", "layers.1.up", "layers.0.down", "layers.0.up",
    ]  # fmt: skip
    assert modules(graph, "threshold_backward", True) == ["layers.1", "layers.0"]


def test_a_backward_that_was_written_has_the_path_of_the_module_that_applies_it():
    class Twice(nn.Module):
        def forward(self, x):
            return Doubled.apply(x)

    graph = captured(lambda: nn.Sequential(nn.Linear(6, 6), Twice()))
    assert modules(graph, "add", True) == ["1"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_recomputed_has_the_path_of_its_module(reentrant):
    class Checkpointed(Net):
        def forward(self, x):
            x = self.head(x)
            for layer in self.layers:
                x = x + checkpoint(layer, x, use_reentrant=reentrant)
            return x

    graph = captured(Checkpointed)
    assert modules(graph, "relu", True) == ["layers.1", "layers.0"]


def test_functions_have_the_paths_of_the_outermost_module_that_they_call():
    def function(x):
        net = Net()
        return net.head(net(x))

    assert modules(capture_one(function, X), "addmm") == [
        "layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head", "head",
    ]  # fmt: skip
    assert {node.module for node in capture_one(lambda x: x.sin() + 1, X).nodes} == {""}


def test_a_model_without_lines_of_its_own_has_modules():
    program = ModelProgram(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)), call_model, "sequential")
    graph = capture_sequential(program, {"input": gg.Input((4, 6))})
    assert modules(graph, "addmm") == ["0", "2"]


def test_a_module_that_none_holds_has_the_path_of_its_caller():
    class Loose(nn.Module):
        def forward(self, x):
            return nn.Linear(6, 6)(x)

    assert modules(captured(lambda: nn.Sequential(Loose())), "addmm") == ["0"]


# ---------------------------------------------------------------------- wrappers
def ddp(mesh):
    return DistributedDataParallel(Net())


def sharded(mesh):
    net = Net()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def replicated(mesh):
    return replicate(Net(), device_mesh=mesh)


def checkpointed(mesh):
    net = Net()
    net.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in net.layers)
    return net


@pytest.mark.parametrize("wrapped", [ddp, sharded, replicated, checkpointed], ids=lambda wrapped: wrapped.__name__)
def test_wrappers_have_no_part_in_paths(wrapped):
    found = capture_model(Net, wrapped, step=gg.train_step(loss), mesh={"dp": 2}, inputs={"x": gg.Input((4, 6), gg.Shard(0))})
    for graph in (found.sequential, *found.joint.graphs):
        assert modules(graph, "addmm") == ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head"]
        assert {"layers.0.up", "layers.1.down", "head"} <= set(modules(graph, "mm", True))


# ---------------------------------------------------------------------- classes of ranks
class Split(nn.Module):
    """Each rank has its part of the hidden ones."""

    def __init__(self, mesh):
        super().__init__()
        self.size = mesh.size()
        self.mlp = Mlp()

    def forward(self, x):
        x = x.chunk(self.size)[dist.get_rank()]
        return self.mlp(x)


def test_classes_of_ranks_have_the_paths_of_ranks():
    def both():
        return capture_model(Mlp, Split, mesh={"dp": 8}, inputs={"x": gg.Input((16, 6))})

    at_once = both()
    with ranks_apart():
        apart = both()
    assert (at_once.classes, apart.classes) == (1, None)
    for mine, its in zip(at_once.joint.graphs, apart.joint.graphs, strict=True):
        assert [node.module for node in mine.nodes] == [node.module for node in its.nodes]
        assert "mlp.down" in {node.module for node in mine.nodes}


def test_ranks_that_do_the_same_in_other_modules_are_alike():
    """A class has a pattern where its ranks have several paths."""

    class Stages(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Tanh() for _ in range(2))

        def forward(self, x):
            return self.layers[dist.get_rank()](x)

    found = capture_function(lambda x: x, lambda x: Stages()(x), mesh={"pp": 2}, inputs=X)
    assert [modules(graph, "tanh") for graph in found.joint.graphs] == [["layers.0"], ["layers.1"]]
    (alike,) = classes_of(found.joint.graphs, found.relations)
    assert modules(alike.graph, "tanh") == ["layers.{0,1}"]


# ---------------------------------------------------------------------- the path itself
LINE = Source("/home/me/net.py", 12, "forward", Source("/home/me/net.py", 3).inside("layers.2"))
PLACED = LINE.inside("layers.2.mlp")


def test_a_line_is_equal_in_all_modules():
    assert PLACED == LINE and hash(PLACED) == hash(LINE) and LINE.inside("layers.3.mlp") == PLACED
    assert (PLACED.told, LINE.told) == ("layers.2.mlp (me/net.py:12)", "me/net.py:12")
    assert [each.module for each in PLACED.outwards()] == ["layers.2.mlp", "layers.2"]
    assert PLACED.inside("").module == LINE.module == ""


def test_paths_survive_copies_pickles_files_and_the_cache():
    for made in (copy.deepcopy(PLACED), pickle.loads(pickle.dumps(PLACED)), codec.read(codec.written(PLACED))):
        assert made == PLACED and made.module == "layers.2.mlp" and made.caller.module == "layers.2"
    finding = Finding("race", "m", sources=(PLACED,), places=(Place("also", PLACED),))
    assert codec.read(codec.written(finding)).module == "layers.2.mlp"
    graph = capture_one(lambda x: Net()(x), X)
    again = graph_json.loads(graph_json.dumps(graph))
    assert [node.module for node in again.nodes] == [node.module for node in graph.nodes]
    assert "layers.0.up (" in str(graph)
