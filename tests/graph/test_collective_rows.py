"""One row per collective: each has its three meanings, and a row and its meanings are all that a new one takes. Operators that
torch makes of others are recorded as those."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # which defines the fused products
from harness import ROOT, assert_means, fails

import graphguard as gg
from graphguard import Shard
from graphguard.capture.torch.world import collectives as capture
from graphguard.counterexample import collective_code as script
from graphguard.engine.algebra.value import taken
from graphguard.engine.ranks import collective_call as engine
from graphguard.graph.agreement import inconsistency
from graphguard.graph.collectives import COLLECTIVES, Collective, Count, Meanings, Share, of_share
from graphguard.graph.ir import Node, Value
from graphguard.oracle import collectives as oracle

ROOMS = (engine, oracle, script)
DOCS = ROOT / "docs"


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_every_row_has_a_meaning_in_every_room(room):
    assert set(room.MEANINGS) == set(COLLECTIVES)


@pytest.mark.parametrize("name", ["dist.gossip", "dist.all_reduce"])
def test_a_meaning_is_of_a_row_that_has_none_yet(name):
    meanings = Meanings({"dist.all_reduce": len})
    with pytest.raises(ValueError, match=f"{name} is no collective without a meaning"):
        meanings.of(name)(len)


@pytest.mark.parametrize("row", COLLECTIVES.values(), ids=COLLECTIVES)
def test_a_row_says_how_one_tensor_is_shared_if_there_is_one(row):
    assert (row.share is not None) == (row.reads is row.fills is Count.ONE)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_row_is_documented(name):
    assert f"`{name}(" in (DOCS / "graph.md").read_text()


@pytest.mark.parametrize(("filled", "problem"), [((2, 3), None), ((6,), None), ((2, 4), "f32[2, 3] does not fill f32[2, 4]")])
@pytest.mark.parametrize("name", sorted(of_share(Share.WHOLE)))
def test_what_is_alike_has_one_size(name, filled, problem):
    attributes = {"group": (0, 1), "root": 0, "reduce": "sum", "work": 1}
    node = Node(name, (Value(0, (2, 3), "float32"),), attributes, (Value(1, filled, "float32"),))
    assert inconsistency((0, 1), 1, node) == problem


# ---------------------------------------------------------------------- a row and its meanings are all that a new one takes
@pytest.fixture
def rotate(monkeypatch):
    """A made-up collective: every rank gets the tensor of the rank before it."""
    name = "dist.rotate"
    monkeypatch.setitem(COLLECTIVES, name, Collective(name, Count.ONE, Count.ONE, Share.WHOLE))

    def described(m, node):
        groups = m.groups()
        before = groups.members[groups.group, (groups.place - 1) % groups.size]
        return [m.own(taken(m.ops.table, m.operand(0, node.outputs[0]), np.asarray(before)))]

    def exchanged(match, operands):
        return {rank: operands[match.group[n - 1]] for n, rank in enumerate(match.group)}

    for room, meaning in zip(ROOMS, (described, exchanged, exchanged), strict=True):
        monkeypatch.setitem(room.MEANINGS, name, meaning)
    library = torch.library.Library("gg_rows", "DEF")
    library.define("rotate(Tensor input, str group_name) -> Tensor")
    monkeypatch.setitem(capture.HANDLERS, "gg_rows.rotate.default", capture._functional(name, capture._like))
    yield lambda x: torch.ops._c10d_functional.wait_tensor(torch.ops.gg_rows.rotate(x, dist.group.WORLD.group_name))
    library._destroy()


ROWS = {"x": gg.Input((8, 3), Shard(0))}


def shifted(x):
    return torch.cat([x[-2:], x[:-2]]) * 2


def test_a_new_collective_is_proved(rotate):
    report = gg.verify(shifted, lambda x: rotate(x) * 2, mesh=4, inputs=ROWS, outputs={"out": Shard(0)})
    assert report.verdict == "verified", report


def test_a_new_collective_is_refuted_with_a_script(rotate):
    report = gg.verify(shifted, lambda x: rotate(rotate(x)) * 2, mesh=4, inputs=ROWS, outputs={"out": Shard(0)})
    assert report.verdict == "refuted", report
    assert fails(report.counterexample.script)


def test_ranks_must_agree_on_a_new_collective(rotate):
    def program(x):
        return rotate(x[: 1 + dist.get_rank()])

    (finding,) = gg.verify(shifted, program, mesh=2, inputs=ROWS).findings
    assert finding.kind == "collective-mismatch" and finding.message.endswith("disagree: f32[1, 3] against f32[2, 3]")


# ---------------------------------------------------------------------- products that overlap with communication
def group_name():
    return dist.group.WORLD.group_name


def gathered_product(x, w, dim):
    return torch.ops.symm_mem.fused_all_gather_matmul(x, [w], dim, group_name())[1][0]


def scattered_product(x, w, dim, reduce="sum"):
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, reduce, dim, group_name())


def layers(x, a, b):
    return torch.relu(x @ a) @ b


def asynchronous_layers(x, a, b, dim=0, reduce="sum"):
    """Sequence parallelism: each rank has a part of the rows, and of the hidden size."""
    return scattered_product(torch.relu(gathered_product(x, a, dim)), b, dim, reduce)


LAYERS = {"x": gg.Input((8, 6), Shard(0)), "a": gg.Input((6, 8), Shard(1)), "b": gg.Input((8, 6), Shard(0))}
BATCHES = {**LAYERS, "x": gg.Input((2, 8, 6), Shard(1))}


@pytest.mark.parametrize(("inputs", "dim"), [(LAYERS, 0), (BATCHES, 1)], ids=["rows", "rows of batches"])
def test_products_that_overlap_with_communication_are_proved(inputs, dim):
    def program(x, a, b):
        return asynchronous_layers(x, a, b, dim)

    report = gg.verify(layers, program, mesh={"tp": 2}, inputs=inputs, outputs={"out": Shard(dim)})
    assert report.verdict == "verified", report


def test_the_mean_of_partial_products_is_refuted():
    def program(x, a, b):
        return asynchronous_layers(x, a, b, reduce="avg")

    report = gg.verify(layers, program, mesh={"tp": 2}, inputs=LAYERS)
    assert report.verdict == "refuted" and report.counterexample is not None
    assert fails(report.counterexample.script)


@pytest.mark.parametrize("dim", [0, 1])
def test_products_of_what_is_gathered_mean_what_torch_says(dim):
    def program(x):
        own = torch.cat([x, x])[: 2 if dim == 0 else 4]
        whole, (once, twice) = torch.ops.symm_mem.fused_all_gather_matmul(x, [own, own * 2], dim, group_name())
        return torch.cat([whole.flatten(), once.flatten(), twice.flatten()])

    def meaning(xs):
        whole = torch.cat(xs, dim)
        products = [whole @ torch.cat([x, x])[: 2 if dim == 0 else 4] for x in xs]
        return [torch.cat([whole.flatten(), once.flatten(), 2 * once.flatten()]) for once in products]

    assert_means(program, 2, {"x": gg.Input((4, 2), Shard(0), torch.float64)}, meaning)
