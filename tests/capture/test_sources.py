"""Every operation knows the user's line that it comes from."""

from __future__ import annotations

import inspect
import os

import pytest
import torch
import torch.nn.functional as F
from harness import capture_both, capture_one, line_of
from torch.utils.checkpoint import checkpoint

from graphguard import Input, Shard, train_step
from graphguard.capture.torch.program import ModelProgram
from graphguard.capture.torch.session import capture_sequential

X = {"x": Input((4, 6)), "w": Input((6, 6))}
HERE = os.path.abspath(__file__)


def line(mark):
    return line_of(__file__, f"# {mark}")


def located(graph, op, backward=None):
    """The lines of an operator's nodes, in order."""
    nodes = [node for node in graph.nodes if node.op == op and backward in (None, node.backward)]
    assert nodes, f"no {op} in\n{graph}"
    return [node.source.line for node in nodes]


def assert_all_here(graph):
    assert graph.nodes
    for node in graph.nodes:
        assert node.source is not None and node.source.file == HERE, node


def test_forward_operations_have_the_nearest_user_line():
    def helper(x):
        return x.sin()  # helper

    def function(x, w):
        y = helper(x)
        y = F.layer_norm(y, (6,))  # norm
        return (
            torch.relu(y)  # relu
            @ w  # mm
        )

    graph = capture_one(function, X)
    assert_all_here(graph)
    assert located(graph, "aten.sin.default") == [line("helper")]
    assert located(graph, "aten.native_layer_norm.default") == [line("norm")]
    assert located(graph, "aten.mm.default") in ([line("mm")], [line("relu")])
    assert [node.source.function for node in graph.nodes] == ["helper", "function", "function", "function"]
    assert not any(node.backward for node in graph.nodes)


def test_operations_inside_modules_of_torch_have_the_line_that_calls_them():
    def function(x, w):
        block = torch.nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        return block(x[None])  # block

    graph = capture_one(function, X)
    assert_all_here(graph)
    assert set(located(graph, "aten.native_layer_norm.default")) == {line("block")}


def test_views_are_located_where_they_are_made_or_read():
    def function(x, w):
        row = x[1]  # row
        x.add_(1)  # add
        return row * 2  # read

    graph = capture_one(function, X)
    assert located(graph, "aten.select.int")[-1] == line("read")
    assert located(graph, "aten.add_.Tensor") == [line("add")]


def test_backward_operations_have_the_line_of_their_forward():
    def function(x, w):
        x.requires_grad_()
        w.requires_grad_()
        y = x @ w  # product
        z = torch.tanh(y)  # tanh
        loss = z.pow(3).sum()  # loss
        loss.backward()  # backward
        return x.grad, w.grad

    graph = capture_one(function, X)
    assert_all_here(graph)
    assert located(graph, "aten.mm.default", backward=True) == [line("product")] * 2
    assert located(graph, "aten.tanh_backward.default") == [line("tanh")]
    assert set(located(graph, "aten.pow.Tensor_Scalar", backward=True)) == {line("loss")}
    assert located(graph, "aten.ones_like.default") == [line("backward")]
    assert all(node.backward for node in graph.nodes if node.op == "aten.tanh_backward.default")


def test_a_loop_of_backwards_keeps_the_lines_apart():
    def function(x, w):
        w.requires_grad_()
        for part in x.chunk(2):
            (part @ w).exp().sum().backward()  # first
            (part @ w).sin().sum().backward()  # second
        return w.grad

    graph = capture_one(function, X)
    assert_all_here(graph)
    assert located(graph, "aten.cos.default", backward=True) == [line("second")] * 2
    assert located(graph, "aten.mm.default", backward=True) == [line("first"), line("second")] * 2
    assert set(located(graph, "aten.add_.Tensor")) == {line("first"), line("second")}, "accumulation of gradients"


def test_double_backward_points_at_the_forward_lines():
    def function(x, w):
        x.requires_grad_()
        y = torch.tanh(x)  # inner
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)  # grad
        return torch.autograd.grad(slope.square().sum(), x)  # outer

    graph = capture_one(function, X)
    assert_all_here(graph)
    assert line("inner") in located(graph, "aten.tanh_backward.default")


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2  # scaled forward

    @staticmethod
    def backward(ctx, g):
        return g.cos()  # scaled backward


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g.sin()  # passed backward


def test_a_custom_backward_has_its_own_line():
    def function(x, w):
        x.requires_grad_()
        y = Passed.apply(Scaled.apply(x.exp())).sum()
        return torch.autograd.grad(y, x)

    graph = capture_one(function, X)
    assert_all_here(graph)
    for op, mark in (("aten.cos.default", "scaled backward"), ("aten.sin.default", "passed backward")):
        (node,) = [node for node in graph.nodes if node.op == op]
        assert node.source.line == line(mark) and node.source.function == "backward" and node.backward
    assert located(graph, "aten.mul.Tensor", backward=False) == [line("scaled forward")]


def test_hooks_have_their_own_line():
    def function(x, w):
        w.requires_grad_()
        w.register_hook(lambda g: g.neg())  # hook
        (x @ w).sum().backward()
        return w.grad

    graph = capture_one(function, X)
    (node,) = [node for node in graph.nodes if node.op == "aten.neg.default"]
    assert node.source.line == line("hook") and node.backward


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_operations_have_their_forward_line(reentrant):
    def block(h, w):
        y = h @ w  # recomputed mm
        return torch.tanh(y)  # recomputed tanh

    def function(x, w):
        x.requires_grad_()
        w.requires_grad_()
        checkpoint(block, x, w, use_reentrant=reentrant).sum().backward()
        return x.grad, w.grad

    graph = capture_one(function, X)
    assert_all_here(graph)
    assert set(located(graph, "aten.mm.default")) == {line("recomputed mm")}
    assert (
        set(located(graph, "aten.tanh.default"))
        == set(located(graph, "aten.tanh_backward.default"))
        == {line("recomputed tanh")}
    )


def test_an_optimizer_step_has_the_line_that_calls_it():
    def function(x, w):
        weight = torch.nn.Parameter(w)
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        (x @ weight).sum().backward()
        optimizer.step()  # step
        return weight

    graph = capture_one(function, X)
    assert_all_here(graph)
    assert set(located(graph, "aten.lerp_.Scalar")) == {line("step")}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)

    def forward(self, x):
        h = torch.tanh(self.a(x))  # net tanh
        return self.b(h)  # net out


def loss_of(model, x):
    return model(x).square().mean()  # net loss


def test_a_training_step_points_at_the_users_lines_only():
    graph = capture_sequential(ModelProgram(Net, train_step(loss_of), "sequential"), {"x": X["x"]})
    assert_all_here(graph)
    marks = {line(mark) for mark in ("net tanh", "net out", "net loss")}
    assert {node.source.line for node in graph.nodes} == marks
    assert located(graph, "aten.tanh_backward.default") == [line("net tanh")]


def test_a_default_step_over_a_module_of_torch_has_no_line_of_ours():
    program = ModelProgram(lambda: torch.nn.Linear(6, 3), lambda model, x: model(x), "sequential")  # lambda
    graph = capture_sequential(program, {"x": X["x"]})
    assert_all_here(graph)
    assert {node.source.line for node in graph.nodes} == {line("lambda")}


def test_input_relations_never_point_at_whoever_runs_the_capture():
    inputs = {"x": Input((4, 6), Shard(0)), "w": Input((6, 6), local=lambda w, at: w.chunk(2)[at["world"]].t())}  # local
    captured = capture_both(lambda x, w: x, lambda x, w: x, 2, inputs)
    for relation in captured.relations:
        assert relation.nodes
        assert {node.source and (node.source.file, node.source.line) for node in relation.nodes} <= {
            None,
            (HERE, line("local")),
        }
    assert inspect.getfile(pytest) not in str(captured.relations)
