"""Operators of the user's own: what their bodies do is seen, or what is assumed of them is said."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import assert_replays_as_eager, capture_one
from torch.library import Library, custom_op

import graphguard as gg
from graphguard.capture.torch.relation.inputs import Input
from graphguard.errors import CaptureError

X = {"x": Input((4, 4))}
LIBRARY = Library("gg_bodies", "FRAGMENT")
LIBRARY.define("add(Tensor x, int k) -> (Tensor, Tensor)")
LIBRARY.impl("add", lambda x, k: (x + k, x * k), "CompositeExplicitAutograd")
LIBRARY.define("same(Tensor x) -> Tensor")
LIBRARY.impl("same", lambda x: x, "CPU")


@custom_op("gg_bodies::reduce", mutates_args=())
def reduce(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    if dist.is_initialized():
        dist.all_reduce(y)
    return y


@custom_op("gg_bodies::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x)


@custom_op("gg_bodies::told_noise", mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
def told_noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x)


@custom_op("gg_bodies::sine", mutates_args=())
def sine(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.sin(x.numpy()))


@custom_op("gg_bodies::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@custom_op("gg_bodies::double_", mutates_args=("x",))
def double_(x: torch.Tensor) -> None:
    x.mul_(2)


@custom_op("gg_bodies::reduce_and_read", mutates_args=())
def reduce_and_read(x: torch.Tensor) -> torch.Tensor:
    y = torch.randn_like(x)
    return y * float(x.sum())


for _each in (reduce, noise, told_noise, sine, double, reduce_and_read):
    _each.register_fake(torch.empty_like)
double.register_autograd(lambda ctx, gradient: gradient * 5)


def verify(program):
    return gg.verify(program, program, mesh=2, inputs={"x": gg.Input((4, 4))})


def test_a_collective_in_a_body_is_seen():
    assert verify(lambda x: reduce(x)).verdict == "refuted"


def test_a_random_number_in_a_body_must_be_declared():
    with pytest.raises(CaptureError, match=r"gg_bodies.noise.default draws random numbers, and is not declared to"):
        capture_one(lambda x: noise(x), X)
    assert any(node.op.startswith("aten.randn_like") for node in capture_one(lambda x: told_noise(x), X).nodes)


def in_place(x):
    double_(x)
    return x


def with_its_gradient(x):
    x.requires_grad_()
    return double(x).detach(), torch.autograd.grad(double(x).sum(), x)[0]


@pytest.mark.parametrize("program", [in_place, with_its_gradient, lambda x: torch.ops.gg_bodies.add(x, 3)])
def test_bodies_replay_as_eager(program):
    graph = assert_replays_as_eager(program, X)
    assert not any(node.op.startswith("gg_bodies") for node in graph.nodes) and not graph.assumptions


def test_a_body_that_returns_its_argument_is_refused():
    with pytest.raises(CaptureError, match=r"gg_bodies.same.default returns memory of an argument"):
        capture_one(lambda x: torch.ops.gg_bodies.same(x), X)


def test_an_operator_that_is_not_looked_into_is_named():
    graph = assert_replays_as_eager(lambda x: sine(x), X)
    assert [node.op for node in graph.nodes] == ["gg_bodies.sine.default"]
    assert graph.assumptions[0].startswith(
        "gg_bodies::sine is taken to be a function of its operands alone; it is not looked into: its body cannot be recorded: "
    )


def test_a_body_with_effects_that_cannot_be_recorded_is_refused():
    with pytest.raises(CaptureError, match=r"gg_bodies.reduce_and_read.default draws random numbers"):
        capture_one(lambda x: reduce_and_read(x), X)


def test_a_lemma_comes_before_the_body(monkeypatch):
    from graphguard import scope

    monkeypatch.setattr(scope, "_OF_PROCESS", {})
    gg.lemma("gg_bodies::double", "... -> ...")
    graph = capture_one(lambda x: double(x), X)
    assert [node.op for node in graph.nodes] == ["gg_bodies.double.default"] and not graph.assumptions
