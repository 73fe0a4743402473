"""From a wrong output back to the operation that is wrong first: which line is named, and what is said of it."""

import inspect

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard


def named(sequential, distributed, inputs):
    """The texts of the first two lines that are named, and what is said first."""
    report = gg.verify(sequential, distributed, mesh={"tp": 2}, inputs=inputs)
    assert report.verdict == "refuted"
    lines, start = inspect.getsourcelines(distributed)
    places = dict.fromkeys(line.line for finding in report.findings for line in finding.lines)
    return [lines[place - start].strip() for place in places][:2], report.findings[0].message


def test_an_operand_that_was_taken_for_another_is_named_where_it_is_used():
    def sequential(x, a, b):
        h = torch.tanh(x @ a)
        return torch.sigmoid(h + x) @ b

    def stale(x, a, b):
        h = torch.tanh(x @ a)
        g = torch.sigmoid(x + x)
        y = g @ b
        return y - 0 * h.sum()

    inputs = {"x": gg.Input((4, 6), Shard(0)), "a": gg.Input((6, 6)), "b": gg.Input((6, 3))}
    lines, said = named(sequential, stale, inputs)
    assert "g = torch.sigmoid(x + x)" in lines
    assert said.startswith("out: what is made here is ") and " where the sequential program has " in said


def test_a_line_whose_result_and_gradient_are_both_wrong_is_put_right_as_a_whole():
    def sequential(tokens, weight):
        weight.requires_grad_()
        y = F.embedding(tokens, weight)
        y.square().sum().backward()
        return y.detach(), weight.grad

    def unmasked(tokens, weight):
        weight.requires_grad_()
        start = dist.get_rank() * weight.size(0)
        ids = (tokens - start).clamp(0, weight.size(0) - 1)
        rows = F.embedding(ids, weight)
        total = rows.detach().clone()
        dist.all_reduce(total)
        rows.backward(2 * total)
        return total, weight.grad

    inputs = {"tokens": gg.Input((5,), dtype=torch.int64, low=0, high=8), "weight": gg.Input((8, 3), Shard(0))}
    lines, said = named(sequential, unmasked, inputs)
    assert "rows = F.embedding(ids, weight)" in lines
    assert "not what the sequential program has; the first value that differs is made at" in said


def test_a_gradient_that_is_left_out_is_named_at_the_line_that_it_should_come_of():
    def sequential(x, w):
        w.requires_grad_()
        h = torch.tanh(x @ w)
        (h @ w).square().sum().backward()
        return w.grad

    def detached(x, w):
        w.requires_grad_()
        h = torch.tanh(x @ w)
        y = h @ w.detach()
        y.square().sum().backward()
        dist.all_reduce(w.grad)
        return w.grad

    inputs = {"x": gg.Input((4, 6), Shard(0)), "w": gg.Input((6, 6))}
    lines, said = named(sequential, detached, inputs)
    assert "y = h @ w.detach()" in lines
    assert said == "out: the gradient that should come of this line is left out"


def test_what_is_exchanged_in_the_wrong_order_is_named_where_it_is_put_together():
    def sequential(x, w):
        return torch.tanh(x) @ w

    def reversed_parts(x, w):
        h = torch.tanh(x)
        parts = [torch.empty_like(h) for _ in range(2)]
        dist.all_gather(parts, h)
        whole = torch.cat(parts[::-1], -1)
        return whole @ w

    inputs = {"x": gg.Input((4, 6), Shard(1)), "w": gg.Input((6, 3))}
    lines, said = named(sequential, reversed_parts, inputs)
    assert "whole = torch.cat(parts[::-1], -1)" in lines
    assert said == "out: another part of it is meant on each rank"
