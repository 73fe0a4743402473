"""Each rank starts from the state that this process had, and leaves nothing behind in it."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harness import assert_replays_as_eager, capture_both, capture_ranks, random_inputs, rank_inputs
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from graphguard.capture.torch.relation.inputs import Input
from graphguard.oracle.replay import replay_joint

VISITED = ["parent"]
INPUTS = {"x": Input((8,), Shard(0), torch.float64)}


def run(distributed, world=4, inputs=INPUTS):
    captured = capture_ranks(distributed, world, inputs)
    assert not captured.joint.findings, captured.joint.findings
    return replay_joint(captured.joint, rank_inputs(captured, random_inputs(inputs)))


@pytest.fixture(params=["parent without a group", "parent in a group"])
def parent(request):
    """What torch.distributed is in this process, before and after."""
    if request.param == "parent without a group":
        yield lambda: (dist.is_initialized(),)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    subgroup = dist.new_group([0, 1])
    yield lambda: (
        dist.get_rank(), dist.get_world_size(), dist.get_backend(), dist.get_process_group_ranks(subgroup),
        dist.distributed_c10d._get_default_group().group_name, subgroup.group_name, id(dist.group.WORLD),
        dist.distributed_c10d._resolve_process_group(subgroup.group_name) is not None,
    )  # fmt: skip
    dist.destroy_process_group()


def test_globals_that_a_rank_sets_are_seen_by_no_other():
    def program(x):
        VISITED.append(f"rank {dist.get_rank()}")
        torch.some_flag = getattr(torch, "some_flag", 0) + 1
        return {"visits": float(len(VISITED)), "flag": float(torch.some_flag), "x": x}

    for outputs in run(program):
        assert outputs["visits"] == 2 and outputs["flag"] == 1
    assert VISITED == ["parent"] and not hasattr(torch, "some_flag")


def test_the_sequential_program_does_not_see_the_ranks_nor_they_it():
    def program(x):
        VISITED.append("someone")
        return {"visits": float(len(VISITED)), "x": x}

    captured = capture_both(program, program, 2, INPUTS)
    for graph in [captured.sequential, *captured.ranks]:
        constant = graph.constants[graph.outputs["visits"]]
        assert constant.data == torch.tensor(2.0, dtype=torch.float64).numpy().tobytes()
    assert VISITED == ["parent"]


def test_ranks_start_from_the_state_at_the_time_of_the_call(monkeypatch):
    monkeypatch.setitem(globals(), "VISITED", ["parent", "again"])
    assert all(outputs["visits"] == 2 for outputs in run(lambda x: {"visits": float(len(VISITED)), "x": x}))


@pytest.mark.parametrize("before", [{}, {"RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "7"}], ids=["unset", "set"])
def test_environment_says_which_rank_it_is(before, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)

    def program(x):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        os.environ["LEFT_BEHIND"] = "yes"
        return {name: float(os.environ[name]) for name in names}

    for rank, outputs in enumerate(run(program, 3)):
        assert {name: int(value) for name, value in outputs.items()} == {
            "RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 3
        }  # fmt: skip
    assert {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} == {
        name: before.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    assert "LEFT_BEHIND" not in os.environ


def test_ranks_have_their_own_world_and_the_parent_keeps_its(parent):
    def program(x, mesh):
        rank, world = dist.get_rank(), dist.get_world_size()
        pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        total = functional.all_reduce(x, "sum", pair)  # finds its group by name
        dist.all_reduce(x)
        whole = DTensor.from_local(x, mesh, [Shard(0)]).redistribute(placements=[Replicate()]).to_local()
        return {"rank": float(rank), "world": float(world), "pair": total, "sum": x, "whole": whole}

    before = parent()
    got = run(program)
    assert parent() == before
    x = random_inputs(INPUTS)["x"].chunk(4)
    for rank, outputs in enumerate(got):
        first = rank // 2 * 2
        assert outputs["rank"] == rank and outputs["world"] == 4
        torch.testing.assert_close(outputs["pair"], x[first] + x[first + 1])
        torch.testing.assert_close(outputs["sum"], sum(x))
        torch.testing.assert_close(outputs["whole"], sum(x).repeat(4))


def test_groups_of_the_parent_are_not_counted_among_the_ranks_own(parent):
    """A rank's first group over some ranks is the first, whatever groups the parent has over them."""

    def program(x):
        dist.all_reduce(x)
        return x

    captured = capture_ranks(program, 3, {"x": Input((3,), Shard(0))})  # as many ranks as the parent's world
    assert [node.kwargs.get("channel") for node in captured.ranks[0].nodes if node.op == "dist.all_reduce"] == [None]


def test_the_sequential_program_has_no_process_group(parent):
    def program(x):
        assert not dist.is_initialized()
        with pytest.raises(ValueError):
            dist.get_rank(dist.group.WORLD)
        return x

    before = parent()
    capture_both(program, lambda x: x, 2, INPUTS)
    assert parent() == before


def test_a_failing_rank_leaves_the_parent_as_it_was(parent):
    def program(x):
        torch.add = None
        raise ValueError(f"rank {dist.get_rank()} gives up")

    before = parent()
    with pytest.raises(Exception, match="gives up"):
        run(program)
    assert parent() == before and torch.add is not None


def test_a_sequential_program_in_a_group_of_its_own_sends_to_itself():
    """Some libraries need process groups even on one device."""

    def program(x):
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        total, whole, pieces, part = x * 2, x.new_empty(8), [torch.empty_like(x)], torch.empty_like(x)
        dist.all_reduce(total, async_op=True).wait()
        dist.all_gather_into_tensor(whole, x + 1)
        dist.all_gather(pieces, x + 2)
        dist.reduce_scatter_tensor(part, x + 3)
        dist.broadcast(part[:4], 0)
        dist.barrier()
        mean = functional.all_reduce(x + 4, "sum", dist.group.WORLD) * 1
        dist.destroy_process_group()
        return {"total": total, "whole": whole, "pieces": pieces, "part": part, "mean": mean}

    graph = assert_replays_as_eager(program, INPUTS)
    assert not any(node.communicates for node in graph.nodes)
