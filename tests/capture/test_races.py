"""Buffers that are used while communication runs in the background, and buffers that do not lie in memory as backends take
them to. Beside each fault stands a correct twin."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from harness import assert_replays_as_gloo, capture_ranks, marked, named

from graphguard import Input, Shard
from graphguard.capture.torch.world.races import windows_overlap
from graphguard.graph.findings import Finding

F64 = torch.float64
INPUTS = {"x": Input((8, 6), Shard(0), F64)}


def rank() -> int:
    return dist.get_rank()


def faults(program: Callable[..., Any]) -> list[Finding]:
    return capture_ranks(program, 2, INPUTS).joint.findings


def assert_races(program: Callable[..., Any], ranks: tuple[int, ...], marks: str = "ba") -> list[Finding]:
    """One race on each of these ranks, with the line of the use and the line that started the communication."""
    findings = faults(program)
    assert [(finding.kind, finding.ranks) for finding in findings] == [("race", (number,)) for number in ranks]
    for finding in findings:
        assert [source.line for source in finding.sources] == marked(program, marks)
    return findings


# ---------------------------------------------------------------------- uses before the wait
def read_before_wait(x):
    work = dist.all_reduce(x, async_op=True)  # a
    y = x * 2  # b
    work.wait()
    return y


def written_before_wait(x):
    work = dist.all_reduce(x, async_op=True)  # a
    x.add_(1)  # b
    work.wait()
    return x


def gathered_output_read(x):
    out = x.new_empty((8, 6))
    work = dist.all_gather_into_tensor(out, x, async_op=True)  # a
    y = out.sum()  # b
    work.wait()
    return y


def gathered_input_overwritten(x):
    out = [torch.empty_like(x), torch.empty_like(x)]
    work = dist.all_gather(out, x, async_op=True)  # a
    x.zero_()  # b
    work.wait()
    return out


def one_of_the_outputs_read(x):
    out = [torch.empty_like(x), torch.empty_like(x)]
    work = dist.all_to_all(out, [x, x * 2], async_op=True)  # a
    y = out[1] + 1  # b
    work.wait()
    return y


def row_read_through_a_view(x):
    work = dist.all_reduce(x, async_op=True)  # a
    y = x.view(-1)[3] + 1  # b
    work.wait()
    return y


def written_through_an_older_view(x):
    row = x[1]
    work = dist.all_reduce(x, async_op=True)  # a
    row.mul_(2)  # b
    work.wait()
    return x


def whole_read_while_a_part_is_filled(x):
    work = dist.all_reduce(x[1:2], async_op=True)  # a
    y = x + 1  # b
    work.wait()
    return y


def used_by_other_communication(x):
    y = torch.empty_like(x)
    work = dist.all_reduce(x, async_op=True)  # a
    dist.all_to_all_single(y, x)  # b
    work.wait()
    return y


def functional_input_overwritten(x):
    y = funcol.all_to_all_single(x, None, None, dist.group.WORLD)  # a
    x.zero_()  # b
    return y + 1


def written_as_out_before_wait(x):
    out = x.new_empty((8, 6))
    work = dist.all_gather_into_tensor(out, x, async_op=True)  # a
    torch.add(x, 1, out=out[:4])  # b
    work.wait()
    return out


@named(read_before_wait, written_before_wait, gathered_output_read, gathered_input_overwritten, one_of_the_outputs_read,
       row_read_through_a_view, written_through_an_older_view, whole_read_while_a_part_is_filled,
       functional_input_overwritten, written_as_out_before_wait, used_by_other_communication)  # fmt: skip
def test_use_of_a_buffer_in_flight_is_a_race_with_both_lines(program):
    assert_races(program, (0, 1))


def test_sent_buffer_may_be_read_but_not_written():
    def overwritten(x):
        if rank() == 0:
            work = dist.isend(x, 1)  # a
            x.zero_()  # b
            work.wait()
        else:
            dist.recv(x, 0)
        return x

    def read(x):
        if rank() == 0:
            work = dist.isend(x, 1)
            y = x * 2
            work.wait()
            return y
        dist.recv(x, 0)
        return x

    (finding,) = assert_races(overwritten, (0,))
    place = "tests/capture/test_races.py:{}".format
    send, write = (place(line) for line in marked(overwritten, "ab"))
    assert finding.message == (
        f"a buffer that dist.send ({send}) reads in the background is written at {write} before its wait; "
        "call wait() first, or use another buffer"
    )
    assert faults(read) == []


def test_received_buffer_is_neither_read_nor_written():
    def program(x, write=False):
        if rank() == 0:
            dist.send(x, 1)
            return x
        work = dist.irecv(x, 0)
        y = x.fill_(3.0) if write else x.clone()
        work.wait()
        return y

    assert [(f.kind, f.ranks) for f in faults(lambda x: program(x))] == [("race", (1,))]
    assert [(f.kind, f.ranks) for f in faults(lambda x: program(x, True))] == [("race", (1,))]


def test_buffer_returned_without_any_wait_is_a_race():
    def program(x):
        dist.all_reduce(x, async_op=True)  # a
        return x

    first, _ = assert_races(program, (0, 1), marks="a")
    (line,) = marked(program, "a")
    assert first.message == (
        f"a buffer that dist.all_reduce (tests/capture/test_races.py:{line}) fills in the background is returned "
        "before its wait; call wait() first, or use another buffer"
    )


def test_one_race_in_a_loop_is_reported_once():
    def program(x):
        for _ in range(3):
            work = dist.all_reduce(x, async_op=True)  # a
            y = x * 2  # b
            work.wait()
        return y

    assert_races(program, (0, 1))


# ---------------------------------------------------------------------- uses that are fine
def used_after_wait(x):
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    x.mul_(2)
    return x + 1


def used_before_start(x):
    y = x * 2
    x.add_(1)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x, y


def other_half_used(x):
    work = dist.all_reduce(x[:2], async_op=True)
    x[2:].mul_(3)
    y = x[2:] + 1
    work.wait()
    return x, y


def other_columns_used(x):
    """The columns interleave with those in flight, row by row."""
    flat = x.reshape(-1)
    out = torch.stack([flat, flat], 1)
    work = dist.all_reduce(flat[:4], async_op=True)
    y = out[:, 0] + flat[4:8].sum()
    work.wait()
    return y


def other_columns_of_one_buffer(x):
    grid = torch.zeros(4, 6, dtype=F64)
    sent = x.t().contiguous()
    rows = grid.t()
    work = dist.all_gather([rows[0], rows[1]], sent[0], async_op=True)
    grid[:, 2:].add_(1)
    y = grid[:, 3] * 2
    work.wait()
    return grid, y


def every_other_element(x):
    flat = x.view(-1)
    work = dist.all_gather([flat[0:12:2], flat[1:12:2]], flat[12:18].clone(), async_op=True)
    y = flat[12::3] * 2
    work.wait()
    return y, flat


def views_made_but_not_used(x):
    work = dist.all_reduce(x, async_op=True)
    view = x.view(2, 12)[1:].transpose(0, 1)
    part = x.split(2)[0].detach()
    work.wait()
    return view + 1, part * 2


def functional_result_used(x):
    y = funcol.all_reduce(x, "sum", dist.group.WORLD)
    return y.view(-1)[:3] * 2 + x.sum()


def double_buffered(x):
    """Two buffers take turns: one is in flight while the other is used."""
    total, buffers, work = 0, [x.clone(), x.clone()], None
    for step in range(4):
        buffer = buffers[step % 2]
        buffer.mul_(0.5)
        if work is not None:
            work.wait()
            total = total + buffers[1 - step % 2].sum()
        work = dist.all_reduce(buffer, async_op=True)
    work.wait()
    return total


@pytest.mark.gloo
@named(used_after_wait, used_before_start, other_half_used, other_columns_used, other_columns_of_one_buffer,
       every_other_element, views_made_but_not_used, functional_result_used, double_buffered)  # fmt: skip
def test_use_that_does_not_touch_what_is_in_flight_is_no_race(program):
    assert_replays_as_gloo(program, 2, INPUTS)


def test_windows_overlap_exactly_where_their_bytes_do():
    storage = torch.zeros(24, dtype=torch.float32)
    flat, grid = storage, storage.view(4, 6)
    windows = [flat, flat[:0], flat[5:9], flat[::3], flat[1::3], grid[:, 2:4], grid[:, 4:], grid[1:3, ::2], grid.t()[3],
               grid[2].expand(3, 6), flat.view(torch.int8)[13:14], flat.view(torch.int8)[3:90:7], flat.unfold(0, 5, 2),
               flat.view(2, 3, 4)[:, 1, ::2]]  # fmt: skip

    def geometry(tensor):
        return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, False, False

    def touched(tensor):
        offset, shape, strides, dtype, *_ = geometry(tensor)
        spots = itertools.product(*[range(size) for size in shape])
        firsts = {offset + sum(i * stride for i, stride in zip(spot, strides, strict=True)) for spot in spots}
        return {first * dtype.itemsize + byte for first in firsts for byte in range(dtype.itemsize)}

    for a, b in itertools.product(windows, repeat=2):
        assert windows_overlap(geometry(a), geometry(b)) == bool(touched(a) & touched(b)), (geometry(a), geometry(b))


# ---------------------------------------------------------------------- buffers that are not contiguous
def gathered(x, piece):
    dist.gather(
        piece, [torch.empty_like(piece, memory_format=torch.contiguous_format) for _ in range(2)] if rank() == 0 else None
    )
    return x


def scattered(x, piece):
    dist.scatter(torch.empty(piece.shape, dtype=F64), [piece, piece] if rank() == 0 else None)
    return x


def exchanged(x, piece):
    out = [torch.empty(piece.shape, dtype=F64) for _ in range(2)]
    dist.all_to_all(out, [piece, piece])
    return out


def exchanged_as_one(x, piece):
    out = torch.empty(piece.shape, dtype=F64)
    dist.all_to_all_single(out, piece)
    return out


def all_gathered(x, piece):
    out = [torch.empty(piece.shape, dtype=F64) for _ in range(2)]
    dist.all_gather(out, piece)
    return out


def all_gathered_into_one(x, piece):
    out = x.new_empty((2 * piece.shape[0], *piece.shape[1:]))
    dist.all_gather_into_tensor(out, piece)
    return out


def reduce_scattered(x, piece):
    out = x.new_empty((piece.shape[0] // 2, *piece.shape[1:]))
    dist.reduce_scatter_tensor(out, piece)
    return out


def reduced_with_gaps(x, piece):
    dist.all_reduce(piece)
    return x


def broadcast_with_gaps(x, piece):
    dist.broadcast(piece, 0)
    return x


def sent_with_gaps(x, piece):
    if rank() == 0:
        dist.send(piece, 1)
    else:
        dist.recv(piece, 0)
    return x


USES = named(gathered, scattered, exchanged, exchanged_as_one, all_gathered, all_gathered_into_one, reduce_scattered,
             reduced_with_gaps, broadcast_with_gaps, sent_with_gaps)  # fmt: skip


@USES
def test_buffer_with_gaps_is_found(program):
    findings = faults(lambda x: program(x, x[:, :2]))
    assert findings and {finding.kind for finding in findings} == {"strided-buffer"}
    first, (line, last) = findings[0], (program.__code__.co_firstlineno, inspect.getsourcelines(program)[0])
    assert first.ranks == (0,) and line < first.sources[0].line < line + len(last)
    assert "works on a tensor of shape (4, 2) with strides (6, 1), which is not contiguous" in first.message


@USES
def test_contiguous_twin_of_it_is_fine(program):
    assert faults(lambda x: program(x, x[:, :2].contiguous())) == []


@named(gathered, scattered, exchanged, exchanged_as_one, all_gathered)
def test_transposed_buffer_is_found_where_the_order_in_memory_matters(program):
    assert {finding.kind for finding in faults(lambda x: program(x, x[:, :4].contiguous().t()))} == {"strided-buffer"}


def strided_output(x):
    out = x.new_empty((6, 8)).t()
    dist.all_gather_into_tensor(out, x)
    return out


def strided_output_of_reduce_scatter(x):
    out = x.new_empty((6, 4)).t()
    dist.reduce_scatter(out, [x, x])
    return out


@named(strided_output, strided_output_of_reduce_scatter)
def test_strided_output_is_found(program):
    assert {finding.kind for finding in faults(program)} == {"strided-buffer"}


@pytest.mark.gloo
def test_elementwise_communication_of_buffers_transposed_alike_is_fine():
    def program(x):
        y, z = x.t(), (x * 2).t()
        dist.all_reduce(y)
        dist.broadcast(z, 1)
        return y, z, x

    assert_replays_as_gloo(program, 2, INPUTS)


@pytest.mark.parametrize("what", [dist.all_reduce, lambda y: dist.broadcast(y, 0), lambda y: dist.reduce(y, 0)])
def test_elementwise_communication_of_buffers_laid_out_differently_is_found(what):
    def program(x):
        y = x.t() if rank() else x.t().contiguous()
        what(y)
        return y

    (finding,) = faults(program)
    assert (finding.kind, finding.ranks) == ("strided-buffer", (0, 1))
    assert finding.message.endswith("disagree: the memory of their tensors is laid out differently; use `.contiguous()`")


def test_message_between_buffers_laid_out_differently_is_found():
    def program(x, also=False):
        y = x.t()
        if rank() == 0:
            dist.send(y, 1)
        else:
            dist.recv(y if also else x.view(6, 4), 0)
        return x

    (finding,) = faults(lambda x: program(x))
    assert (finding.kind, finding.ranks) == ("strided-buffer", (0, 1))
    assert faults(lambda x: program(x, True)) == []


@pytest.mark.gloo
def test_functional_collectives_send_a_contiguous_copy():
    def program(x):
        group = dist.group.WORLD
        columns = x[:, :2]
        return (
            funcol.all_gather_single(x.t(), 0, group) + 0,
            funcol.all_to_all_single(columns, None, None, group) + 0,
            funcol.reduce_scatter_single(columns, "sum", 0, group) + 0,
            funcol.broadcast(columns, 1, group) + 0,
        )

    assert_replays_as_gloo(program, 2, INPUTS)


@pytest.mark.gloo
def test_lists_of_strided_tensors_are_copied_where_torch_copies_them():
    def program(x):
        out = [x.new_empty((6, 4)).t() for _ in range(2)]
        dist.all_gather(out, x)
        mine = x.new_empty((4, 2))
        dist.reduce_scatter(mine, [x[:, :2], x[:, 1:3]])
        return out, mine

    assert_replays_as_gloo(program, 2, INPUTS)
