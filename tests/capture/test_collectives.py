"""Every tensor collective of torch.distributed means in replay what it means over gloo, or, where gloo lacks it, what its
definition says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
from harness import assert_means, assert_replays_as_gloo, capture_ranks, named
from torch.distributed import ReduceOp

from graphguard import Input, Shard
from graphguard.errors import CaptureError

F64 = torch.float64
ROWS = {"x": Input((12, 3), Shard(0), F64)}  # 12 rows split over 2, 3 or 4 ranks


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


# ---------------------------------------------------------------------- reductions
@pytest.mark.gloo
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT, ReduceOp.AVG], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_replays_as_gloo(op, size):
    def program(x):
        dist.all_reduce(x, op)
        return x

    assert_replays_as_gloo(program, size, ROWS)


@pytest.mark.gloo
@pytest.mark.parametrize("op", [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR, ReduceOp.SUM], ids=str)
def test_all_reduce_of_integers_replays_as_gloo(op):
    def program(x):
        dist.all_reduce(x, op)
        return x

    assert_replays_as_gloo(program, 3, {"x": Input((6, 2), Shard(0), torch.int64, high=100)})


def test_premultiplied_sum_scales_each_rank_before_adding():
    def program(x):
        dist.all_reduce(x, dist._make_nccl_premul_sum(0.5 + rank()))
        return x

    assert_means(program, 3, ROWS, lambda xs: [0.5 * xs[0] + 1.5 * xs[1] + 2.5 * xs[2]] * 3)


def test_premultiplied_sum_with_a_tensor_factor_is_refused():
    def program(x):
        known = dist._make_nccl_premul_sum(3.0)
        dist.all_reduce(x, dist._make_nccl_premul_sum(torch.ones(1, dtype=F64)))
        return x * (known is not None)

    with pytest.raises(CaptureError, match="the factor of a PREMUL_SUM must be a Python number"):
        capture_ranks(program, 2, ROWS)


def test_average_of_integers_rounds_toward_zero():
    def program(x):
        dist.all_reduce(x, ReduceOp.AVG)
        return x

    inputs = {"x": Input((6, 4), Shard(0), torch.int64, high=100)}
    assert_means(program, 3, inputs, lambda xs: [torch.div(sum(xs), 3, rounding_mode="trunc")] * 3)


@pytest.mark.parametrize(
    ("op", "meaning"), [(ReduceOp.SUM, torch.logical_or), (ReduceOp.PRODUCT, torch.logical_and)], ids=["or", "and"]
)
def test_reduction_of_booleans_is_a_logical_one(op, meaning):
    def program(x):
        dist.all_reduce(x, op)
        return x

    assert_means(program, 2, {"x": Input((8, 4), Shard(0), torch.bool)}, lambda xs: [meaning(*xs)] * 2)


# ---------------------------------------------------------------------- one tensor from or to every rank
def all_gather_list(x):
    out = [torch.empty_like(x) for _ in range(world())]
    dist.all_gather(out, x)
    return out


def all_gather_concat(x):
    out = x.new_empty((12, 3))
    dist.all_gather_into_tensor(out, x)
    return out


def all_gather_into_part(x):
    out = x.new_zeros((14, 3))
    dist.all_gather_into_tensor(out[1:13], x * 2)
    return out


def reduce_scatter_list(x):
    out = x.new_empty((1, 3))
    pieces = [x[i : i + 1] * (i + rank()) for i in range(world())]
    dist.reduce_scatter(out, pieces)
    return out


def reduce_scatter_tensor(x):
    out = x.new_empty((1, 3))
    dist.reduce_scatter_tensor(out, x[: world()].contiguous())
    return out


def reduce_scatter_tensor_flat(x):
    out = x.new_empty(x.numel())
    dist.reduce_scatter_tensor(out, x.repeat(world(), 1).reshape(-1))
    return out


def all_to_all_list(x):
    out = [torch.empty_like(x) for _ in range(world())]
    dist.all_to_all(out, [x * (i + 1) for i in range(world())])
    return out


def all_to_all_single(x):
    out = x.new_empty((world(), 3))
    dist.all_to_all_single(out, x[: world()].contiguous())
    return out


def all_to_all_single_uneven(x):
    """Rank r sends i + 1 rows to rank i."""
    sent = [i + 1 for i in range(world())]
    out = x.new_empty((world() * (rank() + 1), 3))
    dist.all_to_all_single(out, x.repeat(4, 1)[: sum(sent)], [rank() + 1] * world(), sent)
    return out


def all_to_all_single_with_empty_splits(x):
    """All goes to the first rank."""
    first = rank() == 0
    out = x.new_empty((12 if first else 0, 3))
    dist.all_to_all_single(out, x, [len(x) if first else 0] * world(), [len(x), *[0] * (world() - 1)])
    return out


def broadcast(x):
    dist.broadcast(x, src=1)
    return x


def broadcast_part(x):
    dist.broadcast(x[1], src=1)
    return x


def reduce_at_root(x):
    dist.reduce(x, dst=1, op=ReduceOp.MAX)
    return x if rank() == 1 else None


def gather(x):
    out = [torch.empty_like(x) for _ in range(world())] if rank() == 1 else None
    dist.gather(x, out, dst=1)
    return out


def scatter(x):
    out = torch.empty_like(x)
    dist.scatter(out, [x * (i + 1) for i in range(world())] if rank() == 1 else None, src=1)
    return out


def send_and_receive(x):
    got = torch.zeros_like(x)
    if rank() == 0:
        dist.send(x, 1)
        dist.recv(got, world() - 1)
    else:
        dist.recv(got, rank() - 1)
        dist.send(x + got, (rank() + 1) % world())
    return got


def receive_in_another_shape(x):
    if rank() == 0:
        dist.send(x, 1)
        return x
    got = x.new_empty(x.numel())
    if rank() == 1:
        dist.recv(got, 0)
    return got if rank() == 1 else x


def tagged_messages_out_of_order(x):
    a, b = torch.zeros_like(x), torch.zeros_like(x)
    if rank() == 0:
        works = [dist.isend(x, 1, tag=7), dist.isend(-x, 1, tag=8)]
    elif rank() == 1:
        works = [dist.irecv(b, 0, tag=8), dist.irecv(a, 0, tag=7)]
    else:
        works = []
    for work in works:
        work.wait()
    return a, b


def isend_and_irecv(x):
    got = torch.empty_like(x)
    works = [dist.irecv(got, (rank() - 1) % world()), dist.isend(x, (rank() + 1) % world())]
    for work in works:
        work.wait()
    return got


def batched_messages(x):
    got = torch.empty_like(x)
    ops = [dist.P2POp(dist.isend, x, (rank() + 1) % world()), dist.P2POp(dist.irecv, got, (rank() - 1) % world())]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got


def halo_exchange(x):
    """Both ends of one buffer are received while its middle is sent."""
    padded = torch.cat([x.new_zeros(1, 3), x, x.new_zeros(1, 3)])
    left, right = (rank() - 1) % world(), (rank() + 1) % world()
    works = [
        dist.irecv(padded[:1], left, tag=1),
        dist.irecv(padded[-1:], right, tag=2),
        dist.isend(padded[-2:-1], right, tag=1),
        dist.isend(padded[1:2], left, tag=2),
    ]
    inside = padded[1:-1] * 2
    for work in works:
        work.wait()
    return padded, inside


def halo_exchange_through_other_views(x):
    """As above, but what is sent is seen through a view that was made before, and what is received through another."""
    padded = torch.cat([x.new_zeros(1, 3), x, x.new_zeros(1, 3)])
    flat, columns = padded.view(-1), padded.t()
    left, right = (rank() - 1) % world(), (rank() + 1) % world()
    works = [dist.irecv(padded[:1], left, tag=1), dist.irecv(flat[-3:], right, tag=2)]
    columns[:, 2].mul_(2)
    works += [dist.isend(flat[-6:-3], right, tag=1), dist.isend(columns.t()[1], left, tag=2)]
    for work in works:
        work.wait()
    return padded, columns + 1


def barrier(x):
    dist.barrier()
    dist.monitored_barrier()
    return x


PLAIN = (
    all_gather_list, all_gather_concat, all_gather_into_part, reduce_scatter_list,
    reduce_scatter_tensor, reduce_scatter_tensor_flat, all_to_all_list, all_to_all_single, all_to_all_single_uneven,
    all_to_all_single_with_empty_splits, broadcast, broadcast_part, reduce_at_root, gather, scatter, send_and_receive,
    receive_in_another_shape, tagged_messages_out_of_order, isend_and_irecv, batched_messages, halo_exchange,
    halo_exchange_through_other_views, barrier,
)  # fmt: skip


@pytest.mark.gloo
@named(*PLAIN)
def test_collective_replays_as_gloo(program):
    assert_replays_as_gloo(program, 3, ROWS)


@pytest.mark.gloo
@named(all_gather_list, all_to_all_single_uneven, reduce_scatter_tensor, broadcast, isend_and_irecv)
def test_collective_replays_as_gloo_on_another_number_of_ranks(program):
    assert_replays_as_gloo(program, 2, ROWS)


def test_all_gather_of_uneven_shapes_gives_each_rank_its_piece():
    """gloo refuses uneven shapes; NCCL sends each rank's own."""

    def program(x):
        out = [x.new_empty((rows, 3)) for rows in (3, 3, 1)]
        dist.all_gather(out, x)
        return torch.cat(out)

    assert_means(program, 3, {"x": Input((7, 3), Shard(0), F64)}, lambda xs: [torch.cat(xs)] * 3)


def test_all_gather_into_a_stacked_tensor_adds_a_dim():
    """gloo refuses this shape, which NCCL takes."""

    def program(x):
        out = x.new_empty((world(), *x.shape))
        dist.all_gather_into_tensor(out, x)
        return out

    assert_means(program, 3, ROWS, lambda xs: [torch.stack(xs)] * 3)


def test_what_reduce_leaves_off_the_root_is_not_a_number():
    def program(x):
        dist.reduce(x, dst=0)
        return x

    assert_means(program, 2, ROWS, lambda xs: [xs[0] + xs[1], torch.full((6, 3), torch.nan, dtype=F64)], exactly=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
def test_reduce_of_other_dtypes_is_right_on_the_root(dtype):
    def program(x):
        dist.reduce(x, dst=0, op=ReduceOp.MAX)
        return x if rank() == 0 else None

    inputs = {"x": Input((4, 3), Shard(0), dtype)}
    assert_means(program, 2, inputs, lambda xs: [torch.maximum(*xs), None])


# ---------------------------------------------------------------------- asynchronous and coalesced
def async_all_reduce(x):
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x


def async_waited_out_of_order(x):
    y, out = x * 3, x.new_empty((12, 3))
    first, second = dist.all_reduce(y, async_op=True), dist.all_gather_into_tensor(out, x, async_op=True)
    second.wait()
    first.wait()
    return out, y


def waited_through_its_future(x):
    dist.all_reduce(x, async_op=True).get_future().wait()
    return x


def coalesced_all_reduces(x):
    y = x[:1] * 2
    with dist._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(y)
    return x, y


def coalesced_all_gathers_waited_later(x):
    a, b = x.new_empty((12, 3)), x.new_empty((world(), 3))
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(a, x)
        dist.all_gather_into_tensor(b, x[:1])
    manager.wait()
    return a, b


def coalesced_reduce_scatters(x):
    a, b = x.new_empty((1, 3)), x.new_empty((2, 3))
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(a, x[: world()].contiguous())
        dist.reduce_scatter_tensor(b, x.repeat(2, 1)[: 2 * world()].contiguous())
    return a, b


def all_reduce_coalesced(x):
    y = x[1:] + 1
    dist.all_reduce_coalesced([x, y], op=ReduceOp.MAX)
    return x, y


def all_gather_coalesced(x):
    out = [[torch.empty_like(x), x.new_empty(3)] for _ in range(world())]
    dist.all_gather_coalesced(out, [x, x[0]])
    return out


@pytest.mark.gloo
@named(async_all_reduce, async_waited_out_of_order, waited_through_its_future, coalesced_all_reduces,
       coalesced_all_gathers_waited_later, all_reduce_coalesced, all_gather_coalesced)  # fmt: skip
def test_asynchronous_and_coalesced_forms_replay_as_gloo(program):
    assert_replays_as_gloo(program, 3, ROWS)


def test_coalesced_reduce_scatters_add_each_ranks_rows():
    def program(x):
        return torch.cat(coalesced_reduce_scatters(x))

    def meaning(xs):
        twice = sum(xs).repeat(2, 1)
        return [torch.cat([sum(xs)[r : r + 1], twice[2 * r : 2 * r + 2]]) for r in range(3)]

    assert_means(program, 3, ROWS, meaning)


def test_coalescing_with_a_device_waits_for_all_its_messages():
    """The form for NCCL: the calls inside give no work of their own."""

    def program(x):
        got = torch.empty_like(x)
        with dist._coalescing_manager(device=x.device, async_ops=True) as manager:
            dist.isend(x, (rank() + 1) % world())
            dist.irecv(got, (rank() - 1) % world())
        manager.wait()
        return got

    assert_means(program, 3, ROWS, lambda xs: [xs[2], xs[0], xs[1]])


def nested_blocks(x):
    with dist._coalescing_manager(device=x.device), dist._coalescing_manager(dist.new_group(), x.device):
        dist.all_reduce(x)
    return x


def from_any_source(x):
    dist.recv(x) if rank() else dist.send(x, 1)
    return x


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (nested_blocks, "a coalesced block of communication inside another one is not modelled"),
        (from_any_source, "a receive from any source may match different sends in different runs; name the source rank"),
    ],
    ids=["nested blocks", "any source"],
)
def test_what_has_no_exact_meaning_is_refused_with_its_line(program, message):
    with pytest.raises(CaptureError, match=rf"^rank \d: tests/capture/test_collectives.py:\d+: {message}$"):
        capture_ranks(program, 2, ROWS)


def test_asking_whether_work_has_completed_is_an_assumption():
    def program(x):
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():
            pass
        return x

    captured = capture_ranks(program, 2, ROWS)
    assert captured.joint.findings == []
    assert captured.assumptions == ["work that the program asks about (`is_completed`) has completed by then"]


# ---------------------------------------------------------------------- functional collectives
def weigh(y):
    """A gradient that differs from rank to rank and from element to element."""
    return (y * torch.arange(1, y.numel() + 1, dtype=F64).reshape(y.shape) * (rank() + 1)).sum()


def with_gradient(function):
    """The function's result, and the gradient of its input through a loss of each rank's own."""

    def program(x):
        x.requires_grad_()
        y = function(x)
        (gradient,) = torch.autograd.grad(weigh(y), x)
        return y, gradient

    program.__name__ = function.__name__
    return program


def functional_all_reduce(x):
    return funcol.all_reduce(x, "sum", dist.group.WORLD)


def functional_all_gather(x):
    return funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD)


def functional_all_gather_along_columns(x):
    return funcol.all_gather_tensor_autograd(x, 1, dist.group.WORLD)


def functional_reduce_scatter(x):
    return funcol.reduce_scatter_tensor_autograd(x.repeat(3, 1), "sum", 0, dist.group.WORLD)


def functional_reduce_scatter_along_columns(x):
    return funcol.reduce_scatter_tensor_autograd(x, "sum", 1, dist.group.WORLD)


def functional_all_to_all(x):
    return funcol.all_to_all_single_autograd(x.repeat(3, 1), None, None, dist.group.WORLD)


def functional_all_to_all_uneven(x):
    sent, got = [1, 2, 1], [[1, 2, 1][rank()]] * 3
    return funcol.all_to_all_single_autograd(x, got, sent, dist.group.WORLD)


@pytest.mark.gloo
@named(functional_all_reduce, functional_all_gather, functional_all_gather_along_columns, functional_reduce_scatter,
       functional_reduce_scatter_along_columns, functional_all_to_all, functional_all_to_all_uneven)  # fmt: skip
def test_functional_collective_and_its_backward_replay_as_gloo(program):
    assert_replays_as_gloo(with_gradient(program), 3, ROWS)


def functional_broadcast(x):
    return funcol.broadcast(x, 1, dist.group.WORLD) * 2


def functional_maximum(x):
    return funcol.all_reduce(x, "max", dist.group.WORLD) + x


def functional_average(x):
    return funcol.all_reduce(x, "avg", dist.group.WORLD)


def functional_permute(x):
    return funcol.permute_tensor(x.reshape(-1), [1, 2, 0], dist.group.WORLD)


def functional_coalesced(x):
    sums = funcol.all_reduce_coalesced([x, x[0]], "sum", dist.group.WORLD)
    gathered = funcol.all_gather_into_tensor_coalesced([x, x[:1]], dist.group.WORLD)
    return [tensor * 1 for tensor in sums + gathered]


def functional_of_a_transposed_tensor(x):
    return funcol.all_reduce(x.t(), "sum", dist.group.WORLD) + 1


def functional_input_changed_while_in_flight(x):
    """all_reduce and broadcast work on a copy of their input."""
    total, sent = funcol.all_reduce(x, "sum", dist.group.WORLD), funcol.broadcast(x, 1, dist.group.WORLD)
    x.zero_()
    return total + 0, sent + 0, x


def rank_list_as_group(x):
    return funcol.all_reduce(x, "sum", [0, 1, 2]) * 1


@pytest.mark.gloo
@named(functional_broadcast, functional_maximum, functional_average, functional_permute, functional_coalesced,
       functional_of_a_transposed_tensor, functional_input_changed_while_in_flight, rank_list_as_group)  # fmt: skip
def test_functional_collective_replays_as_gloo(program):
    assert_replays_as_gloo(program, 3, ROWS)


# ---------------------------------------------------------------------- torch.distributed.nn
def nn_all_reduce(x):
    return dist_nn.all_reduce(x)


def nn_all_gather(x):
    return torch.cat(dist_nn.all_gather(x))


def nn_broadcast(x):
    return dist_nn.broadcast(x, 1)


def nn_all_to_all(x):
    return torch.cat(dist_nn.all_to_all([torch.empty_like(x) for _ in range(3)], [x * (i + 1) for i in range(3)]))


def nn_all_to_all_single(x):
    return dist_nn.all_to_all_single(x.new_empty(3, 3), x[:3])


def nn_reduce_scatter(x):
    return dist_nn.reduce_scatter(torch.empty_like(x), [x * (i + 1) for i in range(3)])


def nn_scatter(x):
    return dist_nn.scatter([x * (i + 1) for i in range(3)], 1)


def nn_gather(x):
    return torch.cat(dist_nn.gather(x, 1))


@pytest.mark.gloo
@named(nn_all_reduce, nn_all_gather, nn_broadcast, nn_all_to_all, nn_all_to_all_single, nn_reduce_scatter, nn_scatter,
       nn_gather)  # fmt: skip
def test_differentiable_collective_and_its_backward_replay_as_gloo(program):
    assert_replays_as_gloo(with_gradient(program), 3, ROWS)
