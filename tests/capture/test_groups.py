"""Object collectives whose objects shape the computation, and groups and meshes that programs make."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from harness import assert_means, assert_replays_as_gloo, capture_ranks, named
from torch.distributed import init_device_mesh

from graphguard import Input, Shard
from graphguard.errors import CaptureError, MismatchError

F64 = torch.float64
ROWS = {"x": Input((12, 3), Shard(0), F64)}


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


# ---------------------------------------------------------------------- objects that shape the computation
def gathered_sizes(x):
    sizes = [None] * world()
    dist.all_gather_object(sizes, {"rows": len(x), "of": rank()})
    return x * sum(size["rows"] * (size["of"] + 1) for size in sizes)


def broadcast_plan(x):
    plan = [rank(), "own"] if rank() == 1 else [None, None]
    dist.broadcast_object_list(plan, src=1)
    return x[: plan[0] + 1] if plan[1] == "own" else x


def gathered_then_scattered(x):
    seen = [None] * world() if rank() == 0 else None
    dist.gather_object(rank() + 5, seen, dst=0)
    mine = [None]
    dist.scatter_object_list(mine, [n * 2 for n in seen] if rank() == 0 else None, src=0)
    return x + mine[0]


def sent_objects(x):
    got = [None, None]
    if rank() == 0:
        dist.send_object_list(["scale", 4], dst=1)
    elif rank() == 1:
        dist.recv_object_list(got, src=0)
    return x * (got[1] or 1)


@pytest.mark.gloo
@named(gathered_sizes, broadcast_plan, gathered_then_scattered, sent_objects)
def test_objects_of_other_ranks_shape_the_computation_as_over_gloo(program):
    assert_replays_as_gloo(program, 3, {"x": Input((11, 3), Shard(0), F64)})


def test_an_object_with_a_tensor_inside_is_refused():
    def program(x):
        dist.all_gather_object([None] * world(), {"deep": [x]})
        return x

    message = "rank 0: .*: an object collective carries a tensor; send tensors with the tensor collectives"
    with pytest.raises(CaptureError, match=message):
        capture_ranks(program, 2, ROWS)


def test_an_object_that_no_rank_sends_is_a_fault_of_the_communication():
    def program(x):
        if rank() == 0:
            dist.recv_object_list([None], src=1)
        return x

    with pytest.raises(MismatchError, match="ranks 0 wait in an object collective for objects that no rank sends") as caught:
        capture_ranks(program, 2, ROWS)
    assert caught.value.finding.kind == "unmatched-message"
    assert caught.value.finding.message.endswith("but rank 1 never sends it")


# ---------------------------------------------------------------------- groups
def two_new_groups(x):
    pairs = [dist.new_group([0, 1]), dist.new_group([3, 2])]
    dist.all_reduce(x, group=pairs[rank() // 2])
    return x


def group_in_an_order_of_its_own(x):
    group = dist.new_group([2, 0, 3, 1], sort_ranks=False)
    out = [torch.empty_like(x) for _ in range(4)]
    dist.all_gather(out, x, group=group)
    dist.broadcast(x, group_src=1, group=group)
    return out, x, torch.tensor(dist.get_rank(group))


def group_of_another_backend(x):
    dist.all_reduce(x, group=dist.new_group(backend="gloo"))
    return x


def new_subgroups(x):
    group, _ = dist.new_subgroups(2)
    dist.all_reduce(x, group=group)
    return x


def subgroups_by_enumeration(x):
    group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    out = x.new_empty((6, 3))
    dist.all_gather_into_tensor(out, x, group=group)
    return out


def roots_and_peers_of_a_group(x):
    """Roots and peers are given as ranks of the world, or of the group."""
    group = dist.new_group([1, 3])
    if rank() in (1, 3):
        dist.broadcast(x, src=3, group=group)
        dist.all_reduce(x, group=group)
        if rank() == 1:
            dist.send(x, group=group, group_dst=1)
        else:
            dist.recv(x, group=group, group_src=0)
    return x


def groups_used_in_different_orders(x):
    """Two groups over the same ranks do not wait for each other."""
    first, second = dist.new_group(), dist.new_group()
    y = x * 2
    calls = [lambda: dist.all_reduce(x, group=first, async_op=True), lambda: dist.broadcast(y, 0, group=second, async_op=True)]
    works = [call() for call in (calls if rank() % 2 else calls[::-1])]
    for work in works:
        work.wait()
    return x, y


def one_dimensional_mesh(x):
    mesh = init_device_mesh("cpu", (4,))
    return funcol.all_reduce(x, "sum", mesh) * 1


def two_dimensional_mesh(x):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    y = funcol.all_gather_tensor(x, 0, mesh["tp"]) * (1 + mesh.get_local_rank("tp"))
    dist.all_reduce(x, group=mesh.get_group("dp"))
    return x, y


def flattened_mesh(x):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = mesh["dp", "tp"]._flatten("all")
    return funcol.all_reduce(x, "sum", mesh["all"]) * flat.size()


def given_mesh(x, mesh):
    y = x * 1
    dist.all_reduce(y, group=mesh.get_group("tp"))
    return x + y * (1 + mesh.get_local_rank("dp"))


@pytest.mark.gloo
@named(two_new_groups, group_in_an_order_of_its_own, group_of_another_backend, new_subgroups, subgroups_by_enumeration,
       roots_and_peers_of_a_group, groups_used_in_different_orders, one_dimensional_mesh, two_dimensional_mesh,
       flattened_mesh)  # fmt: skip
def test_group_made_by_the_program_replays_as_gloo(program):
    assert_replays_as_gloo(program, 4, ROWS)


@pytest.mark.gloo
def test_mesh_given_to_the_program_has_the_axes_of_the_check():
    assert_replays_as_gloo(given_mesh, {"dp": 2, "tp": 2}, {"x": Input((12, 3), {"dp": Shard(0), "tp": Shard(0)}, F64)})


def test_three_dimensional_mesh_reduces_along_each_axis():
    def program(x):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        a, b = x * 1, x * 1
        dist.all_reduce(a, group=mesh["dp"].get_group())
        dist.all_reduce(b, group=mesh["pp", "tp"]._flatten().get_group())
        return torch.cat([a, b, funcol.all_gather_tensor(x, 0, mesh["tp"])])

    def meaning(xs):
        grid = torch.stack(xs).reshape(2, 2, 2, *xs[0].shape)
        dp, rest = grid.sum(1, keepdim=True).expand_as(grid), grid.sum((0, 2), keepdim=True).expand_as(grid)
        pairs = torch.cat([grid[:, :, 0], grid[:, :, 1]], -2)[:, :, None].expand(2, 2, 2, -1, -1)
        return list(torch.cat([dp, rest, pairs], -2).reshape(8, -1, xs[0].shape[1]))

    assert_means(program, 8, {"x": Input((16, 3), Shard(0), F64)}, meaning)
