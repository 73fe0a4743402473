"""For every kind of relation: with one rank's output or gradient taken away, nothing stays verified.

Each check is captured once. Then an output is taken out of one rank's graph, as if the rank had returned None, and the rest of
`verify` runs as ever: what is expected, the proof, the execution, the verdict.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphguard as gg
from graphguard import Partial, Replicate, Shard
from graphguard.capture.torch import front

ROWS = {"x": gg.Input((4, 6), Shard(0))}
UNEVEN = {"x": gg.Input((5, 6), Shard(0))}
WHOLE = {"x": gg.Input((4, 6))}
SUMMED = {"x": gg.Input((4, 6), Partial())}


def twice(x):
    return x * 2


def function(distributed, inputs, mesh=2, sequential=twice, **options):
    return lambda: gg.verify(sequential, distributed, mesh=mesh, inputs=inputs, **options)


# ---------------------------------------------------------------------- functions
def labelled(*placements):
    return lambda x, mesh: DTensor.from_local(x * 2, mesh, list(placements))


def strided(x, mesh):
    return distribute_tensor(x * 2, mesh, [Shard(0), Shard(0)])


def zigzag(full, coord):
    pieces = full.chunk(4)
    return torch.cat([pieces[coord["world"]], pieces[3 - coord["world"]]])


def padded(full, coord):
    return {"x": F.pad(full["x"].flatten(), (0, 2)).chunk(2)[coord["world"]]}


def last_stage(x):
    return x * 2 if dist.get_rank() >= 2 else None


def turned_rows(full, coord):
    return full.chunk(2)[coord["world"]].t()


FUNCTIONS = {
    "shard": function(twice, ROWS, outputs={"out": Shard(0)}),
    "shard-inferred": function(twice, ROWS),
    "shard-uneven": function(twice, UNEVEN, outputs={"out": Shard(0)}),
    "shard-uneven-inferred": function(twice, UNEVEN),
    "partial": function(twice, SUMMED, outputs={"out": Partial()}),
    "partial-inferred": function(twice, SUMMED),
    "average": function(lambda x: x * 4, SUMMED, outputs={"out": Partial("avg")}),
    "code": function(lambda x: (x * 2).t(), ROWS, outputs={"out": turned_rows}),
    "transposed": function(lambda x: (x * 2).t(), ROWS),
    "zigzag": function(twice, {"x": gg.Input((8, 6), local=zigzag)}, outputs={"out": zigzag}),
    "padded": function(twice, {"x": gg.Input((4, 5))}, local_inputs=padded),
    "dtensor-shard": function(labelled(Shard(0)), ROWS),
    "dtensor-partial": function(labelled(Partial()), SUMMED),
    "dtensor-two-axes": function(strided, WHOLE, mesh={"a": 2, "b": 2}),
    "stage": function(
        last_stage, {"x": gg.Input((4, 6), {"tp": Shard(0)})}, mesh={"pp": 2, "tp": 2}, outputs={"out": {"tp": Shard(0)}}
    ),
}


# ---------------------------------------------------------------------- modules
class Net(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.up, self.down = nn.Linear(4, hidden, bias=False), nn.Linear(hidden, 4, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Column(Net):
    """Half of the hidden units on each rank, as Megatron has it."""

    def __init__(self):
        super().__init__(4)

    def forward(self, x):
        y = super().forward(x)
        dist.all_reduce(y)  # whose backward is the identity
        return y


class Stage(nn.Module):
    """A pipeline stage: the first has `up`, the second has `down`."""

    def __init__(self):
        super().__init__()
        if dist.get_rank() == 0:
            self.up = nn.Linear(4, 8, bias=False)
        else:
            self.down = nn.Linear(8, 4, bias=False)


def squared(model, x):
    return model(x).square().sum()


def in_stages(model, x):
    """The loss on both ranks; the backward of the second goes on in the first."""
    if isinstance(model, Net):
        return squared(model, x)
    return Pipe.apply(torch.relu(model.up(x)), None) if dist.get_rank() == 0 else Pipe.apply(None, model.down.weight)


class Pipe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight):
        if weight is None:
            dist.send(hidden, 1)
            loss = hidden.new_empty(())
            dist.recv(loss, 1)
            ctx.shape = hidden.shape
        else:
            hidden = weight.new_empty((3, 8))
            dist.recv(hidden, 0)
            loss = (hidden @ weight.t()).square().sum()
            dist.send(loss, 0)
            ctx.save_for_backward(hidden, weight)
        return loss

    @staticmethod
    def backward(ctx, grad):
        if dist.get_rank() == 0:
            back = grad.new_empty(ctx.shape)
            dist.recv(back, 1)
            return back, None
        hidden, weight = ctx.saved_tensors
        out = 2 * (hidden @ weight.t()) * grad
        dist.send(out @ weight, 0)
        return None, out.t() @ hidden


def tensor_parallel(mesh):
    return parallelize_module(Net(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def halves(full, coord):
    return full.chunk(2)[coord["tp"]]


def module(build, loss=squared, **options):
    inputs = {"x": gg.Input((3, 4))}
    return lambda: gg.verify_model(Net, build, step=gg.train_step(loss), mesh={"tp": 2}, inputs=inputs, **options)


MODULES = {
    "gradient-replicate": module(lambda mesh: Net()),
    "gradient-shard": module(lambda mesh: Column()),
    "gradient-code": module(lambda mesh: Column(), params={"up.weight": halves}),
    "gradient-dtensor": module(tensor_parallel),
    "gradient-fsdp": module(lambda mesh: fully_shard(Net(), mesh=mesh)),
    "gradient-stage": module(lambda mesh: Stage(), in_stages),
}


# ---------------------------------------------------------------------- taking outputs away
def without(captured, rank, path):
    """The same programs, but for one output that one rank does not return."""
    graph = captured.ranks[rank]
    outputs = {name: None if name == path else value for name, value in graph.outputs.items()}
    layouts = {name: layout for name, layout in graph.layouts.items() if name != path}
    ranks = list(captured.ranks)
    ranks[rank] = replace(graph, outputs=outputs, layouts=layouts)
    return replace(captured, ranks=ranks, joint=replace(captured.joint, graphs=ranks))


def verdict(check, captured, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(front, "capture", lambda *args, **options: captured)
        return check().verdict


def captured_by(check, monkeypatch):
    found = []
    capture = front.capture

    def recording(*args, **options):
        found.append(capture(*args, **options))
        return found[0]

    with monkeypatch.context() as patch:
        patch.setattr(front, "capture", recording)
        report = check()
    assert report.verified, report
    return found[0]


def losses_of(check, captured, paths, monkeypatch):
    """The verdict with each output of each rank taken away."""
    return {
        (path, rank): verdict(check, without(captured, rank, path), monkeypatch)
        for path in paths
        for rank, graph in enumerate(captured.ranks)
        if graph.outputs.get(path) is not None
    }


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_an_output_that_a_rank_does_not_return_is_missed(kind, monkeypatch):
    captured = captured_by(FUNCTIONS[kind], monkeypatch)
    verdicts = losses_of(FUNCTIONS[kind], captured, ["out"], monkeypatch)
    assert verdicts and set(verdicts.values()) == {"refuted"}, verdicts


@pytest.mark.parametrize("kind", MODULES)
def test_a_gradient_that_a_rank_does_not_have_is_missed(kind, monkeypatch):
    captured = captured_by(MODULES[kind], monkeypatch)
    paths = [path for path in captured.sequential.outputs if path.startswith("grads.")]
    verdicts = losses_of(MODULES[kind], captured, paths, monkeypatch)
    assert verdicts and set(verdicts.values()) == {"refuted"}, verdicts


@pytest.mark.parametrize("outputs", [None, {"out": Replicate()}], ids=["inferred", "stated"])
def test_a_copy_less_leaves_all_of_the_output_there(outputs, monkeypatch):
    """What is stated speaks of the ranks that return it: the other one has it, whole."""
    check = function(twice, WHOLE, outputs=outputs)
    assert set(losses_of(check, captured_by(check, monkeypatch), ["out"], monkeypatch).values()) == {"verified"}
    check = function(labelled(Replicate()), WHOLE)
    assert set(losses_of(check, captured_by(check, monkeypatch), ["out"], monkeypatch).values()) == {"verified"}
