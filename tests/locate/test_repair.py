"""Repairs of refuted programs: which change is proved, in which words, and where that says to look."""

import inspect

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard

ROWS = {"x": gg.Input((4, 6), Shard(0)), "w": gg.Input((6, 3))}
WHOLE = {"x": gg.Input((4, 6)), "a": gg.Input((6, 8), Shard(1)), "b": gg.Input((8, 3), Shard(0))}


def first(sequential, distributed, inputs, **options):
    """The text of the first line that is named, and the repair that is told there."""
    report = gg.verify(sequential, distributed, mesh={"dp": 2}, inputs=inputs, **options)
    assert report.verdict == "refuted"
    lines, start = inspect.getsourcelines(distributed)
    finding = report.findings[0]
    return lines[finding.distributed.line - start].strip(), finding.repair


def gradient(x, w):
    w.requires_grad_()
    (x @ w).square().mean().backward()
    return w.grad


def test_a_division_too_many_is_named_and_told_as_what_to_leave_out():
    def halved_twice(x, w):
        w.requires_grad_()
        loss = (x @ w).square().mean()
        (loss / 2).backward()
        grad = w.grad.clone()
        dist.all_reduce(grad, op=dist.ReduceOp.AVG)
        return grad

    line, repair = first(gradient, halved_twice, ROWS)
    assert line == "(loss / 2).backward()"
    assert repair.startswith("leave out the division in `(loss / 2).backward()` (tests/locate/test_repair.py:")


def test_a_mean_of_gradients_that_is_missing_is_named_at_the_line_whose_gradient_it_is():
    def sequential(x, w):
        return w.detach() - 0.1 * gradient(x, w)

    def unreduced(x, w):
        w.requires_grad_()
        (x @ w).square().mean().backward()
        return w.detach() - 0.1 * w.grad

    line, repair = first(sequential, unreduced, ROWS)
    assert line == "(x @ w).square().mean().backward()"
    assert repair.startswith("average the gradient that comes of tests/locate/test_repair.py:") and repair.endswith(" over dp")


def test_a_reduction_of_something_else_is_named_as_the_one_that_is_missing():
    def reducing_a_copy(x, w):
        w.requires_grad_()
        (x @ w).square().sum().div(12).backward()
        dist.all_reduce(w.grad.clone())
        return w.grad

    line, repair = first(gradient, reducing_a_copy, ROWS, outputs={"out": Replicate()})
    assert line == "dist.all_reduce(w.grad.clone())"
    assert repair.startswith("sum the gradient that comes of ")


def test_a_collective_that_does_something_else_where_a_sum_is_missing_is_named():
    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w.clone()

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            dist.all_reduce(grad, op=dist.ReduceOp.MIN)
            return grad

    def reduced(x, w):
        (x @ Summed.apply(w.requires_grad_())).square().sum().div(12).backward()
        return w.grad

    report = gg.verify(gradient, reduced, mesh={"dp": 2}, inputs=ROWS, outputs={"out": Replicate()})
    named, start = report.findings[0], inspect.getsourcelines(Summed.backward)[1]
    assert (report.verdict, named.distributed.line - start) == ("refuted", 3)
    assert named.repair.startswith("insert `dist.all_reduce(grad)` after ")


def test_a_number_in_a_backward_that_was_written_comes_before_a_line_of_both_programs():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            return torch.full((2, 3), 2.0)

    def scaled(x, w):
        return 0.5 * (x @ w)

    def sequential(x, w):
        scaled(x, w.requires_grad_()).sum().backward()
        return w.grad

    def doubled(x, w):
        Twice.apply(scaled(x, w.requires_grad_())).backward()
        dist.all_reduce(w.grad)
        return w.grad

    report = gg.verify(sequential, doubled, mesh={"dp": 2}, inputs=ROWS, outputs={"out": Replicate()})
    assert "backward" in [line.function for line in report.findings[0].lines[:2]]


def test_a_count_over_too_many_ranks_is_named_where_it_is_reduced():
    def sequential(x, w):
        return (x @ w).sum() / 4

    def counted(x, w):
        total = (x @ w).sum()
        count = torch.ones(4).sum()
        dist.all_reduce(count)
        dist.all_reduce(total)
        return total / count

    line, repair = first(sequential, counted, ROWS, outputs={"out": Replicate()})
    assert line == "dist.all_reduce(count)" and repair.startswith("leave out `dist.all_reduce(count)` (")


def test_a_wrong_tile_is_named_where_it_is_cut():
    def sequential(x, a, b):
        return (x @ a @ b) * torch.arange(4.0)[:, None].cos()

    def backwards(x, a, b):
        rows = x.chunk(2)[dist.get_rank()]
        weights = torch.arange(4.0)[:, None].cos()
        mine = weights.chunk(2)[1 - dist.get_rank()]
        return (rows @ a @ b) * mine

    inputs = {"x": gg.Input((4, 6)), "a": gg.Input((6, 8)), "b": gg.Input((8, 3))}
    line, repair = first(sequential, backwards, inputs)
    assert line == "mine = weights.chunk(2)[1 - dist.get_rank()]"
    assert repair is None  # it was seen in an execution, and cannot be said as code


def test_where_no_single_change_helps_none_is_told():
    def mlp(x, a, b):
        return torch.tanh(x @ a) @ b

    def another(x, a, b):
        y = torch.relu(torch.sin(x @ a)) @ b
        dist.all_reduce(y)
        return y

    assert first(mlp, another, WHOLE)[1] is None
