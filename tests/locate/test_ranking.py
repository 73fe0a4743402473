"""Where a refuted program is said to be wrong: the first line and the second, and in which words."""

import inspect

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard
from graphguard.locate.made_of import MadeOf, Origin, Probe

MESH = {"tp": 2}
ROWS = {"x": gg.Input((4, 6)), "a": gg.Input((6, 8), Shard(1)), "b": gg.Input((8, 3), Shard(0))}


def mlp(x, a, b):
    return torch.tanh(x @ a) @ b


def named(distributed, inputs=None, sequential=mlp, **options):
    """The texts of the lines that the findings name, in order, each once; and what is said first, and why."""
    report = gg.verify(sequential, distributed, mesh=MESH, inputs=inputs or ROWS, **options)
    assert report.verdict == "refuted"
    lines, first = inspect.getsourcelines(distributed)
    places = dict.fromkeys(line.line for finding in report.findings for line in finding.lines)
    return [
        lines[place - first].strip() for place in places if 0 <= place - first < len(lines)
    ], f"{report.findings[0].message}; {report.findings[0].law}"


def test_a_sum_of_whole_values_is_named_with_how_often_it_counts():
    def twice(x, a, b):
        y = torch.tanh(x @ a) @ b
        dist.all_reduce(y)
        dist.all_reduce(y)  # again
        return y

    lines, said = named(twice)
    assert {*lines[:2]} == {"dist.all_reduce(y)", "dist.all_reduce(y)  # again"}  # either may be left out
    assert said.startswith("out: it is 2 times the expected value: counted 2 times over axis tp; ")


def test_a_wrong_scale_is_named_where_it_enters_and_told_as_a_factor():
    def halved(x, a, b):
        y = torch.tanh(x @ a) @ b
        dist.all_reduce(y)
        return y / dist.get_world_size()

    lines, said = named(halved)
    assert lines[0] == "return y / dist.get_world_size()"
    assert "it is 1/2 times what the sequential program has (the size of axis tp)" in said


def test_a_missing_sum_is_named_where_the_summand_is_used_and_where_it_was_made():
    def sequential(x, a, b):
        return torch.exp(x @ a @ b)

    def unsummed(x, a, b):
        y = x @ a @ b
        return torch.exp(y)

    lines, said = named(unsummed, sequential=sequential)
    assert {*lines[:2]} == {"return torch.exp(y)", "y = x @ a @ b"}
    assert "summand" in said or "never summed" in said


def test_a_wrong_order_is_named_before_the_operation_that_it_spoils():
    def sequential(x, w):
        return x @ w

    def backwards(x, w):
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x)
        whole = torch.cat(parts[::-1], 1)
        return whole @ w

    inputs = {"x": gg.Input((4, 6), Shard(1)), "w": gg.Input((6, 3))}
    lines, _ = named(backwards, inputs, sequential)
    assert lines[:2] == ["whole = torch.cat(parts[::-1], 1)", "return whole @ w"]


def test_the_part_of_a_gather_that_is_taken_is_named_after_the_line_that_uses_it():
    def gathered(x):
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x)
        return parts

    def first_part(x, head):
        everyone = gathered(x)[0]
        return everyone @ head

    inputs = {"x": gg.Input((4, 6), Shard(0)), "head": gg.Input((6, 8), Shard(1))}
    lines, _ = named(first_part, inputs, sequential=lambda x, head: x @ head)
    assert lines[:2] == ["return everyone @ head", "everyone = gathered(x)[0]"]


def test_a_gradient_that_is_not_summed_is_named_where_it_became_a_summand():
    def sequential(x, w):
        w.requires_grad_()
        (x @ w).square().sum().backward()
        return w.grad

    inputs = {"x": gg.Input((4, 6), Shard(0)), "w": gg.Input((6, 3))}

    def unsummed(x, w):
        w.requires_grad_()
        loss = (x @ w).square().sum()
        loss.backward()
        return w.grad

    lines, _ = named(unsummed, inputs, sequential, outputs={"out": Replicate()})
    assert lines[0] == "loss = (x @ w).square().sum()"


def test_a_tensor_is_known_by_its_elements_however_they_are_arranged():
    whole = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    known = MadeOf([(None, whole)])
    assert known.origin(Probe.of(whole.T.flip(0))) == Origin(0, True)
    assert known.origin(Probe.of(whole[1:3])) == Origin(0, False)
    assert known.origin(Probe.of(whole * 3)) is None
    assert known.origin(Probe.of(whole * 3), (2.0, 3.0)) == Origin(0, True, 3.0)
    assert known.origin(Probe.of(torch.where(whole > 0, whole, 0.0))) is None


def test_counts_masks_and_infinities_tell_nothing():
    assert not Probe.of(torch.tensor([1.0, 0.5, 0.125, 2 / 3, -torch.inf], dtype=torch.float64)).numbers.size
    assert not Probe.of(torch.arange(4)).numbers.size
