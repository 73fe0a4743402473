"""verify_model: how the relation of each parameter is found, and what is then expected of its gradient."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import graphguard as gg
from graphguard import Partial, Replicate, Shard
from graphguard.capture.torch.front import models
from graphguard.capture.torch.relation.parameters import found_parameters, use_sequential_names, with_relations
from graphguard.capture.torch.session import capture
from graphguard.capture.torch.wrappers import named_parameters
from graphguard.errors import UsageError

X = {"x": gg.Input((6, 4))}
TP, DP_TP = {"tp": 2}, {"dp": 2, "tp": 2}


class Net(nn.Module):
    def __init__(self, hidden=8, bias=False):
        super().__init__()
        self.up, self.down = nn.Linear(4, hidden, bias=bias), nn.Linear(hidden, 4, bias=bias)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.arange(4.0))

    def forward(self, x):
        return self.head(torch.tanh(self.embed(x))) * self.scale


def nothing(model, x):
    return x


def subject_of(build, mesh, sequential=Net):
    return models(sequential, build, nothing, mesh, X, None)


def found(build, mesh=TP, params="auto", sequential=Net):
    """By parameter, its relation and how it was found."""
    subject = subject_of(build, mesh, sequential)
    captured = capture(subject)
    use_sequential_names(captured)
    parameters = found_parameters(subject, captured, params)
    with_relations(subject, captured, parameters)  # every rank's part has the shape that the rank has
    return {name.removeprefix("params."): str(each) for name, each in parameters.items()}


def marked(net, up=0, down=1, **more):
    for parameter, dim in ((net.up.weight, up), (net.down.weight, down)):
        for name, mark in {"tensor_model_parallel": True, "partition_dim": dim, **more}.items():
            setattr(parameter, name, mark)
    return net


def parallelize(mesh):
    return parallelize_module(Net(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def fully_sharded(mesh):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(parallelize(mesh), mesh=mesh["dp"])


def transposed_mesh(mesh):
    """A DTensor whose own mesh has the axes in another order."""
    net = Net()
    other = dist.device_mesh.DeviceMesh("cpu", mesh.mesh.t().tolist())
    net.up.weight = nn.Parameter(distribute_tensor(net.up.weight.detach(), other, [Shard(0), Shard(0)]))
    return net


DTENSOR, MARK, SAME = "by its DTensor placements", "by its tensor_model_parallel mark", "as its shape is the sequential one's"
FOUND = {
    "equal shapes": (lambda mesh: Net(), TP, {"up.weight": f"Replicate, {SAME}", "down.weight": f"Replicate, {SAME}"}),
    "DTensors": (parallelize, TP, {"up.weight": f"Shard(0) on tp, {DTENSOR}", "down.weight": f"Shard(1) on tp, {DTENSOR}"}),
    "DTensors on one axis of two": (
        parallelize, DP_TP, {"up.weight": f"Shard(0) on tp, {DTENSOR}", "down.weight": f"Shard(1) on tp, {DTENSOR}"},
    ),
    "strided DTensors": (
        fully_sharded, DP_TP,
        {"up.weight": f"_StridedShard(dim=0, sf=2), Shard(dim=0), {DTENSOR}",
         "down.weight": f"Shard(0) on dp and Shard(1) on tp, {DTENSOR}"},
    ),
    "a mesh in another order": (
        transposed_mesh, DP_TP, {"up.weight": f"Shard(dim=0), Shard(dim=0), {DTENSOR}", "down.weight": f"Replicate, {SAME}"},
    ),
    "marks": (
        lambda mesh: marked(Net(4)), TP, {"up.weight": f"Shard(0) on tp, {MARK}", "down.weight": f"Shard(1) on tp, {MARK}"},
    ),
    "marks with a stride": (
        lambda mesh: marked(Net(4), partition_stride=2), TP,
        {"up.weight": f"_StridedShard(dim=0, sf=2), {MARK}", "down.weight": f"_StridedShard(dim=1, sf=2), {MARK}"},
    ),
    "marks on whole tensors": (
        lambda mesh: marked(Net(8)), TP, {"up.weight": f"Replicate, {MARK}", "down.weight": f"Replicate, {MARK}"},
    ),
    "shapes": (
        lambda mesh: Net(4), {"dp": 3, "tp": 2},
        {"up.weight": "Shard(0) on tp, as its shape (4, 4) is a part of (8, 4)",
         "down.weight": "Shard(1) on tp, as its shape (4, 4) is a part of (4, 8)"},
    ),
    "a wrapper": (
        lambda mesh: DistributedDataParallel(Net()), {"dp": 2},
        {"up.weight": f"Replicate, {SAME}", "down.weight": f"Replicate, {SAME}"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_the_relation_of_a_parameter_is_found(case):
    build, mesh, expected = FOUND[case]
    assert found(build, mesh) == expected


def test_what_is_stated_comes_first():
    def half(full, coord):
        return full[: full.shape[0] // 2]

    assert found(lambda mesh: Net(4), DP_TP, {"up.*": half, "down.*": {"tp": Shard(1)}}) == {
        "up.weight": "half, as params= states", "down.weight": "Shard(1) on tp, as params= states",
    }  # fmt: skip


def test_tied_parameters_are_one_and_found_under_each_name():
    same = f"Replicate, {SAME}"
    assert found(lambda mesh: Tied(), sequential=Tied) == {"embed.weight": same}

    def untied(mesh):
        net = Tied()
        net.head.weight = nn.Parameter(net.head.weight.detach().chunk(2)[0].clone())
        return net

    shard = "Shard(0) on tp, as its shape (2, 4) is a part of (4, 4)"
    assert found(untied, sequential=Tied) == {"embed.weight": same, "head.weight": shard}


def test_names_have_no_wrappers_in_them():
    net = Net(bias=True)
    net.up = checkpoint_wrapper(net.up)
    assert [name for name, _ in named_parameters(nn.DataParallel(net))] == [
        "up.weight", "up.bias", "down.weight", "down.bias",
    ]  # fmt: skip


class Summed(Net):
    def __init__(self, mesh):
        super().__init__()
        self.up.weight = nn.Parameter(DTensor.from_local(torch.zeros(8, 4), mesh["tp"], [Partial()]))


UNKNOWN = {
    "'up.weight' is unknown: with shape (4, 4) of (8, 4) it may be Shard(0) on dp or Shard(0) on tp; state it in params=": (
        lambda mesh: Net(4), DP_TP,
    ),
    "'up.weight' is unknown: it has shape (8, 4), and (2, 4) on rank 0; state it in params=": (lambda mesh: Net(2), DP_TP),
    "'up.weight' is unknown: it has shape (8, 4), and (3, 4) on rank 0; state it in params=": (lambda mesh: Net(3), TP),
    "'up.weight' is unknown: rank 0 has f32[4, 4], and its part of the sequential one is f32[8, 2]": (
        lambda mesh: marked(Net(4), up=1), TP,
    ),
    "'up.bias' is unknown: rank 0 has it, and the sequential module has no parameter of that name; "
    "params={name: fn(all_params, coord)} says what it is made of": (
        lambda mesh: Net(bias=True), TP,
    ),
    "'up.weight' is unknown: it is placed by Partial(sum)": (Summed, TP),
}  # fmt: skip


@pytest.mark.parametrize("text", UNKNOWN)
def test_an_unknown_relation_is_one_sentence(text):
    build, mesh = UNKNOWN[text]
    with pytest.raises(UsageError) as caught:
        found(build, mesh)
    assert str(caught.value) == f"the relation of the parameter {text}"


# ---------------------------------------------------------------------- what comes of it
def loss_fn(model, x):
    return model(x).pow(2).sum()


class Halves(Net):
    """Tensor parallelism by hand: half of the hidden features on each rank."""

    def __init__(self, reduce=True):
        super().__init__(4)
        self.reduce = reduce

    def forward(self, x):
        y = super().forward(x)
        if self.reduce:
            dist.all_reduce(y)
        return y


def test_a_model_without_any_marks_is_verified_and_its_shapes_are_assumed():
    report = gg.verify_model(Net, lambda mesh: Halves(), mesh=TP, inputs=X, step=gg.train_step(loss_fn))
    assert report.verdict == "verified", report
    assert report.relation["grads.up.weight"].placements == (("tp", "Shard(0)"),)
    assert "Shard(0) on tp, as their shapes suggest: the parameters up.weight" in report.assumptions
    assert json.loads(report.to_json())["parameters"]["up.weight"].startswith("Shard(0) on tp, as its shape")
    assert "parameter down.weight: Shard(1) on tp, as its shape (4, 4) is a part of (4, 8)" in "\n".join(report.lines(True))


def test_the_gradients_of_a_wrapped_model_are_whole_on_every_rank():
    def verified(build):
        return gg.verify_model(
            Net, build, mesh={"dp": 2}, inputs={"x": gg.Input((6, 4), Shard(0))},
            step=gg.train_step(lambda model, x: model(x).pow(2).mean(), loss={"dp": Partial("avg")}),
        )  # fmt: skip

    report = verified(lambda mesh: DistributedDataParallel(Net()))
    assert report.verdict == "verified" and report.relation["grads.up.weight"].placements == (("dp", "Replicate"),)
    report = verified(lambda mesh: Net())
    assert report.verdict == "refuted" and report.findings[0].message.startswith("grads.")


class Stage(nn.Module):
    """Two stages that share the weight: each has a copy, and the copies' gradients are added."""

    def __init__(self, rank, synced):
        super().__init__()
        self.rank, self.synced = rank, synced
        self.add_module("embed" if rank == 0 else "head", nn.Linear(4, 4, bias=False))
        self.register_buffer("scale", torch.arange(4.0))


def stage_step(model, x):
    if isinstance(model, Tied):
        return gg.train_step(loss_fn)(model, x=x)
    if model.rank == 0:
        h = torch.tanh(model.embed(x))
        dist.send(h.detach(), 1)
        gradient = torch.empty_like(h)
        dist.recv(gradient, 1)
        h.backward(gradient)
        name, weight, loss = "embed.weight", model.embed.weight, None
    else:
        h = torch.empty(6, 4)
        dist.recv(h, 0)
        h.requires_grad_()
        loss = (model.head(h) * model.scale).pow(2).sum()
        loss.backward()
        dist.send(h.grad, 0)
        name, weight, loss = "head.weight", model.head.weight, loss.detach()
    if model.synced:
        dist.all_reduce(weight.grad)
    return {"loss": loss, "grads": {name: weight.grad}}


@pytest.mark.parametrize("synced", [True, False])
def test_a_tied_parameter_of_two_stages(synced):
    report = gg.verify_model(
        Tied, lambda mesh: Stage(dist.get_rank(), synced), mesh={"pp": 2}, inputs=X, step=stage_step,
        outputs={"grads.embed.weight": Replicate()},
    )  # fmt: skip
    assert report.verdict == ("verified" if synced else "refuted"), report
    assert report.parameters == {"embed.weight": f"Replicate, {SAME}"}


@pytest.mark.parametrize(
    ("sequential", "distributed", "step", "text"),
    [
        (Net(), Net, None, "sequential= is a module; give a function that builds it: sequential=lambda: Net(...)"),
        (Net, Net(), None, "distributed= is a module; give a function that builds it: distributed=lambda mesh: Net(...)"),
        (Net, 3, None, "distributed= is int, not a function that builds a module"),
        (Net, lambda: Net(), None, "distributed= is called with the mesh; write distributed=lambda mesh: ..."),
        (Net, lambda mesh: Net(), 3, "step= is int; write step(model, **inputs), or gg.train_step(loss_fn)"),
        (Net, lambda mesh: Net(), gg.train_step(lambda model, x: 3.0),
         "the loss_fn of gg.train_step returned float; it must return a scalar tensor"),
        (Net, lambda mesh: Net(), gg.train_step(lambda model, x: model(x)),
         "the loss_fn of gg.train_step returned a tensor of shape (6, 4); it must be a scalar"),
    ],
)  # fmt: skip
def test_what_is_no_model_or_no_step_is_one_sentence(sequential, distributed, step, text):
    with pytest.raises(UsageError) as caught:
        gg.verify_model(sequential, distributed, mesh=TP, inputs=X, **({} if step is None else {"step": step}))
    assert str(caught.value) == text


def test_a_shape_that_does_not_fit_a_dtensor_is_told_without_a_log(capfd):
    def half_a_plan(mesh):
        return parallelize_module(Net(), mesh, {"down": RowwiseParallel()})

    with pytest.raises(gg.GraphGuardError, match=r"rank 0 raised RuntimeError at .*: a and b must have same reduction dim"):
        gg.verify_model(Net, half_a_plan, mesh=TP, inputs=X)
    assert capfd.readouterr().err == ""
