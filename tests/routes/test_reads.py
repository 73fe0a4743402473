"""Programs that look at numbers of their training: whether gradients are finite, whether the loss is one, whether they are sure
enough to end early. Each has a faulty twin."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

INPUTS = {"x": gg.Input((4, 3), Shard(0)), "w": gg.Input((3, 5)), "b": gg.Input((5,))}


# ---------------------------------------------------------------------- GradScaler
def scaled_step(x, w, b, average=None, unscale_first=True):
    w, b = w.clone().requires_grad_(), b.clone().requires_grad_()
    optimizer = torch.optim.SGD([w, b], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale((torch.relu(x @ w) + b).square().mean()).backward()
    for parameter in (w, b) if average else ():
        average(parameter.grad)
    if unscale_first:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([w, b], 1.0)
    scaler.step(optimizer)
    scaler.update()
    return {"w": w.detach(), "b": b.detach(), "scale": scaler._scale}


def averaged(grad):
    dist.all_reduce(grad, op=dist.ReduceOp.AVG)


def with_data_parallelism(average=averaged, **options):
    def program(x, w, b):
        return scaled_step(x, w, b, average, **options)

    return gg.verify(scaled_step, program, mesh={"dp": 2}, inputs=INPUTS, outputs={"w": Replicate(), "b": Replicate()})


def test_a_step_with_scaled_gradients():
    """Numbers do not overflow: on the only path that there is, all gradients are finite."""
    report = with_data_parallelism()
    assert report.headline == "verified along 1 path"
    assert [(choice.text.split()[0], choice.ways, choice.seen) for choice in report.decisions] == [
        ("ne", 1, "it is True"),
        ("eq", 1, "it is True"),
    ]
    assert report.assumptions[0] == "real arithmetic: numbers are not rounded and do not overflow"


@pytest.mark.parametrize("options", [{"unscale_first": False}, {"average": None}], ids=["clipped while scaled", "not averaged"])
def test_a_step_with_scaled_gradients_that_is_wrong(options):
    report = with_data_parallelism(**options)
    assert report.verdict == "refuted"
    assert not any("decides" in note for note in report.notes)


def columns_of(x, w, b, gather=True):
    """Tensor parallelism: each rank has columns of both parameters, and looks at the gradients of its own."""
    w, b = w.clone().requires_grad_(), b.clone().requires_grad_()
    optimizer, scaler = torch.optim.SGD([w, b], lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    loss = (torch.relu(x @ w) + b).square().sum() / (1 if gather else 2)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    return {"w": w.detach(), "b": b.detach()}


@pytest.mark.parametrize("gather, verdict", [(True, "verified"), (False, "refuted")])
def test_ranks_that_look_at_their_own_gradients(gather, verdict):
    inputs = {"x": gg.Input((4, 3)), "w": gg.Input((3, 6), Shard(1)), "b": gg.Input((6,), Shard(0))}

    def program(x, w, b):
        return columns_of(x, w, b, gather)

    report = gg.verify(columns_of, program, mesh={"tp": 2}, inputs=inputs, outputs={"w": Shard(1), "b": Shard(0)})
    assert (report.verdict, report.paths) == (verdict, 1)


# ---------------------------------------------------------------------- early exits
def until_sure(x, w, b, least=None):
    """As many layers as it takes, for all rows of all ranks."""
    for _ in range(3):
        x = torch.tanh(x @ w) + x
        sure = (x @ b).softmax(-1).amax(-1).min()
        if least is not None:
            least(sure)
        if sure > 0.6:
            break
    return x


def least_of_all(sure):
    dist.all_reduce(sure, op=dist.ReduceOp.MIN)


@pytest.mark.parametrize("least, verdict", [(least_of_all, "verified"), (None, "refuted")])
def test_layers_that_are_left_out(least, verdict):
    def program(x, w, b):
        return until_sure(x, w, b, least)

    inputs = {"x": gg.Input((4, 3), Shard(0)), "w": gg.Input((3, 3)), "b": gg.Input((3, 3))}
    report = gg.verify(until_sure, program, mesh={"dp": 2}, inputs=inputs, outputs={"out": Shard(0)})
    assert report.verdict == verdict
    if verdict == "verified":
        assert report.paths == 2 and report.decisions[0].seen == "it is False, True"


# ---------------------------------------------------------------------- a loss that is no number
def step_unless_nan(x, w, b, average_loss=None, average_gradient=None):
    w = w.clone().requires_grad_()
    loss = ((x @ w + b).square()).mean()
    known = loss.detach().clone()
    if average_loss is not None:
        average_loss(known)
    if known.isnan():
        return w.detach()
    (grad,) = torch.autograd.grad(loss, w)
    if average_gradient is not None:
        average_gradient(grad)
    return w.detach() - 0.1 * grad


@pytest.mark.parametrize("average_gradient, verdict", [(averaged, "verified"), (None, "refuted")])
def test_a_step_that_is_left_out_if_the_loss_is_no_number(average_gradient, verdict):
    def program(x, w, b):
        return step_unless_nan(x, w, b, averaged, average_gradient)

    report = gg.verify(step_unless_nan, program, mesh={"dp": 2}, inputs=INPUTS, outputs={"out": Replicate()})
    assert (report.verdict, report.paths) == (verdict, 1)
