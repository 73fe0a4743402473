"""Communication of ranks that does not fit together: the kind of fault, the ranks, the lines of both sides, and the words.
Beside each fault stands a correct twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import capture_ranks, join_both_ways, marked, named
from torch.distributed import ReduceOp

import graphguard as gg
from graphguard import Input, Shard
from graphguard.capture.torch import session
from graphguard.errors import CaptureError
from graphguard.graph.findings import Finding

INPUTS = {"x": Input((12, 4), Shard(0))}


@pytest.fixture(autouse=True)
def matched_by_classes_too(monkeypatch):
    """Whatever is matched here is also matched by classes of ranks, and both must say the same."""
    monkeypatch.setattr(session, "join", join_both_ways)


def rank() -> int:
    return dist.get_rank()


def faults(program: Callable[..., Any], size: int) -> list[Finding]:
    return capture_ranks(program, size, INPUTS).joint.findings


def assert_finds(program: Callable[..., Any], size: int, kind: str, ranks: tuple[int, ...], marks: str, words: str) -> None:
    """One finding, of this kind, with these ranks, lines and words. In the words {a} stands for the line marked `# a`."""
    (finding,) = faults(program, size)
    assert (finding.kind, finding.ranks) == (kind, ranks)
    assert [source.line for source in finding.sources] == marked(program, marks)
    assert all(source.file == __file__ for source in finding.sources)
    places = {mark: f"tests/graph/test_matching.py:{line}" for mark, line in zip(marks, marked(program, marks), strict=True)}
    assert finding.message == words.format(**places)


# ---------------------------------------------------------------------- collectives of one group
def other_collective(x):
    if rank() == 0:
        dist.all_reduce(x)  # a
    else:
        dist.broadcast(x, 0)  # b
    return x


def other_order(x):
    if rank() == 1:
        dist.broadcast(x, 0)  # b
    dist.all_reduce(x)  # a
    if rank() == 0:
        dist.broadcast(x, 0)
    return x


def other_shape(x):
    y = x[: 2 + rank()].clone()
    dist.all_reduce(y)  # a
    return y


def other_dtype(x):
    y = x.double() if rank() else x.clone()
    dist.broadcast(y, 1)  # a
    return y


def other_reduce_operation(x):
    dist.all_reduce(x, ReduceOp.MAX if rank() else ReduceOp.SUM)  # a
    return x


def other_root(x):
    dist.reduce(x, dst=rank())  # a
    return x


def other_direction(x):
    out = [torch.empty_like(x), torch.empty_like(x)]
    if rank() == 0:
        dist.all_gather(out, x)  # a
    else:
        dist.all_to_all(out, [x, x])  # b
    return out


def uneven_all_gather(x):
    out = [torch.empty_like(x), torch.empty_like(x)]
    dist.all_gather(out, x if rank() == 0 else x[1:])  # a
    return out


def uneven_reduce_scatter(x):
    out = torch.empty_like(x[rank() :])
    dist.reduce_scatter(out, [x, x])  # a
    return out


def uneven_gather(x):
    out = [torch.empty_like(x), torch.empty_like(x)] if rank() == 0 else None
    dist.gather(x if rank() == 0 else x[1:], out, dst=0)  # a
    return x


def uneven_scatter(x):
    out = torch.empty_like(x[rank() :])
    dist.scatter(out, [x, x] if rank() == 0 else None, src=0)  # a
    return out


def uneven_all_to_all(x):
    out = [torch.empty_like(x), torch.empty_like(x)]
    dist.all_to_all(out, [x, x] if rank() == 0 else [x[1:], x])  # a
    return out


def wrong_rows(x):
    out = x.new_empty((3 + rank(), 4))
    dist.all_to_all_single(out, x[:3].contiguous(), [1 + rank(), 2], [1, 2])  # a
    return out


def wrong_width(x):
    out = x.new_empty((2, 4 - rank()))
    dist.all_to_all_single(out, x[:2].contiguous())  # a
    return out


def uneven_list(x):
    """A rank's place for its own tensor is too small."""
    out = [torch.empty_like(x[1:]), torch.empty_like(x)][:: 1 if rank() == 0 else -1]
    dist.all_gather(out, x)  # a
    return out


def wrong_size_of_messages(x):
    if rank() == 0:
        dist.send(x, 1)  # a
    else:
        dist.recv(x[1:], 0)  # b
    return x


PAIRS = "rank 0 at {a} and rank 1 at {b} disagree: "
PAIR = "rank 0 at {a} and rank 1 at {a} disagree: "


@pytest.mark.parametrize(
    ("program", "marks", "words"),
    [
        (other_collective, "ab", PAIRS + "dist.all_reduce against dist.broadcast"),
        (other_order, "ab", PAIRS + "dist.all_reduce against dist.broadcast"),
        (other_shape, "aa", PAIR + "f32[2, 4] against f32[3, 4]"),
        (other_dtype, "aa", PAIR + "f32[6, 4] against f64[6, 4]"),
        (other_reduce_operation, "aa", PAIR + "reduce operation sum against max"),
        (other_root, "aa", PAIR + "root rank 0 against 1"),
        (other_direction, "ab", PAIRS + "dist.all_gather against dist.all_to_all"),
        (uneven_gather, "aa", PAIR + "f32[5, 4] is sent where f32[6, 4] is expected"),
        (uneven_scatter, "aa", PAIR + "f32[6, 4] is sent where f32[5, 4] is expected"),
        (wrong_rows, "aa", PAIR + "1 rows are sent where 2 are expected"),
        (wrong_size_of_messages, "ab", PAIRS + "f32[6, 4] is sent where f32[5, 4] is expected"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_ranks_that_disagree_are_both_named(program, marks, words):
    assert_finds(program, 2, "collective-mismatch", (0, 1), marks, words)


@pytest.mark.parametrize(
    ("program", "at_fault", "words"),
    [
        (uneven_all_gather, 1, "f32[5, 4] is sent where f32[6, 4] is expected"),
        (uneven_reduce_scatter, 1, "f32[6, 4] is sent where f32[5, 4] is expected"),
        (uneven_all_to_all, 1, "f32[5, 4] is sent where f32[6, 4] is expected"),
        (wrong_width, 1, "rows of f32[2, 4] are sent where rows of f32[2, 3] are expected"),
        (uneven_list, 0, "f32[6, 4] is sent where f32[5, 4] is expected"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_tensors_that_do_not_fit_are_found(program, at_fault, words):
    """Which rank notices is not promised: the call may be wrong in itself, or against another rank's."""
    (finding,) = faults(program, 2)
    assert finding.kind == "collective-mismatch" and at_fault in finding.ranks
    assert finding.message.endswith(words)
    assert {source.line for source in finding.sources} == set(marked(program, "a"))


def too_few_outputs(x):
    out = [torch.empty_like(x)]
    dist.all_gather(out, x)  # a
    return out


def wrong_output_size(x):
    out = x.new_empty((13, 4))
    dist.all_gather_into_tensor(out, x)  # a
    return out


def wrong_output_dtype(x):
    out = x.new_empty((12, 4), dtype=torch.float64)
    dist.all_gather_into_tensor(out, x)  # a
    return out


def too_few_inputs(x):
    out = torch.empty_like(x)
    dist.reduce_scatter(out, [x])  # a
    return out


def uneven_input(x):
    out = x.new_empty((2, 4))
    dist.reduce_scatter_tensor(out, x)  # a
    return out


def splits_of_another_size(x):
    out = x.new_empty((6, 4))
    dist.all_to_all_single(out, x, [3, 3], [3, 2])  # a
    return out


def rows_that_do_not_divide(x):
    out = x.new_empty((5, 4))
    dist.all_to_all_single(out, x[:5])  # a
    return out


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (too_few_outputs, "dist.all_gather at {a}: 1 output tensors for 2 ranks"),
        (wrong_output_size, "dist.all_gather_into_tensor at {a}: f32[6, 4] from each of 2 ranks does not fill f32[13, 4]"),
        (wrong_output_dtype, "dist.all_gather_into_tensor at {a}: f32[6, 4] from each of 2 ranks does not fill f64[12, 4]"),
        (too_few_inputs, "dist.reduce_scatter at {a}: 1 input tensors for 2 ranks"),
        (uneven_input, "dist.reduce_scatter_tensor at {a}: f32[6, 4] is not 2 times f32[2, 4]"),
        (splits_of_another_size, "dist.all_to_all_single at {a}: input splits [3, 2] do not cut f32[6, 4] into 2 parts"),
        (rows_that_do_not_divide, "dist.all_to_all_single at {a}: input splits [2, 2] do not cut f32[5, 4] into 2 parts"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_call_that_is_wrong_in_itself_is_found_on_its_rank(program, words):
    assert_finds(program, 2, "collective-mismatch", (0,), "a", "rank 0 calls " + words)


# ---------------------------------------------------------------------- ranks that do not come
def one_rank_less(x):
    if rank() != 1:
        dist.all_reduce(x)  # a
    return x


def one_round_more(x):
    for _ in range(2 + rank() // 2):
        dist.all_reduce(x)  # a
    return x


def early_return(x):
    work = dist.all_reduce(x.clone(), async_op=True) if rank() == 0 else None  # a
    return x * (work is None)


def objects_for_nobody(x):
    if rank() == 0:
        dist.broadcast_object_list([1], src=0)  # a
    return x


@pytest.mark.parametrize(
    ("program", "size", "ranks", "words"),
    [
        (one_rank_less, 3, (0, 1), "rank 0 calls dist.all_reduce at {a}, but rank 1 of its group never does"),
        (one_round_more, 3, (2, 0), "rank 2 calls dist.all_reduce at {a}, but rank 0 of its group never does"),
        (early_return, 2, (0, 1), "rank 0 calls dist.all_reduce at {a}, but rank 1 of its group never does"),
        (objects_for_nobody, 2, (0, 1), "rank 0 calls broadcast_object_list at {a}, but rank 1 of its group never does"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_collective_that_a_rank_never_calls_is_found(program, size, ranks, words):
    assert_finds(program, size, "collective-mismatch", ranks, "a", words)


def send_without_receive(x):
    if rank() == 0:
        dist.send(x, 1)  # a
    return x


def receive_without_send(x):
    if rank() == 1:
        dist.recv(x, 0)  # a
    return x


def background_send_without_receive(x):
    if rank() == 0:
        dist.isend(x, 1)  # a
    return x


def another_tag(x):
    if rank() == 0:
        dist.send(x, 1, tag=1)  # a
    else:
        dist.irecv(x.clone(), 0, tag=2)
    return x


def message_to_itself(x):
    operations = [dist.P2POp(dist.isend, x, rank()), dist.P2POp(dist.irecv, x.clone(), rank())]
    for work in dist.batch_isend_irecv(operations):  # a
        work.wait()
    return x


SENDS = "rank 0 sends to rank 1 at {a}, but rank 1 never receives it"


@pytest.mark.parametrize(
    ("program", "ranks", "words"),
    [
        (send_without_receive, (0, 1), SENDS),
        (receive_without_send, (1, 0), "rank 1 receives from rank 0 at {a}, but rank 0 never sends it"),
        (background_send_without_receive, (0, 1), SENDS),
        (another_tag, (0, 1), SENDS),
        (message_to_itself, (0,), "rank 0 sends to itself at {a}: a message needs two ranks"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_message_without_its_other_side_is_found(program, ranks, words):
    assert_finds(program, 2, "unmatched-message", ranks, "a", words)


# ---------------------------------------------------------------------- waiting in a cycle
def both_receive_first(x):
    got = torch.empty_like(x)
    if rank() == 0:
        dist.recv(got, 1)  # a
        dist.send(x, 1)
    else:
        dist.recv(got, 0)  # b
        dist.send(x, 0)
    return got


def both_send_first(x):
    got = torch.empty_like(x)
    if rank() == 0:
        dist.send(x, 1)  # a
        dist.recv(got, 1)
    else:
        dist.send(x, 0)  # b
        dist.recv(got, 0)
    return got


def groups_in_opposite_order(x):
    first, second = dist.new_group(), dist.new_group()
    if rank() == 0:
        dist.all_reduce(x, group=first)  # a
        dist.all_reduce(x, group=second)
    else:
        dist.all_reduce(x, group=second)  # b
        dist.all_reduce(x, group=first)
    return x


def receive_before_the_collective(x):
    if rank() == 0:
        dist.all_reduce(x)  # a
        dist.send(x, 1)
    else:
        dist.recv(x, 0)  # b
        dist.all_reduce(x)
    return x


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (both_receive_first, ("dist.recv", "dist.recv")),
        (both_send_first, ("dist.send", "dist.send")),
        (groups_in_opposite_order, ("dist.all_reduce", "dist.all_reduce")),
        (receive_before_the_collective, ("dist.all_reduce", "dist.recv")),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_ranks_that_wait_for_each_other_are_a_deadlock(program, words):
    text = f"ranks wait for each other: rank 0 waits in {words[0]} at {{a}}; rank 1 waits in {words[1]} at {{b}}"
    assert_finds(program, 2, "deadlock", (0, 1), "ab", text)


def test_ring_of_receives_names_every_rank_of_the_cycle():
    def ring(x):
        got = torch.empty_like(x)
        dist.recv(got, (rank() + 1) % 3)  # a
        dist.send(x, (rank() - 1) % 3)
        return got

    (finding,) = faults(ring, 3)
    assert (finding.kind, finding.ranks) == ("deadlock", (0, 1, 2))
    assert [source.line for source in finding.sources] == marked(ring, "aaa")


# ---------------------------------------------------------------------- outside the group
def called_from_outside(x):
    group = dist.new_group([0, 1])
    dist.all_reduce(x, group=group)  # a
    return x


def objects_from_outside(x):
    group = dist.new_group([0, 1])
    dist.broadcast_object_list([rank()], src=0, group=group)  # a
    return x


@pytest.mark.parametrize(
    ("program", "name"), [(called_from_outside, "all_reduce"), (objects_from_outside, "broadcast_object_list")]
)
def test_collective_called_from_outside_its_group_is_found(program, name):
    words = f"rank 2 calls {name} at {{a}} on a group that it is not in, so that nothing happens there"
    assert_finds(program, 3, "outside-group", (2,), "a", words)


# ---------------------------------------------------------------------- correct twins
def same_collectives(x):
    out = [torch.empty_like(x), torch.empty_like(x)]
    dist.all_reduce(x, ReduceOp.MAX)
    dist.broadcast(x, 1)
    dist.reduce(x, 1)
    dist.all_gather(out, x)
    dist.all_to_all(out, [x * 2, x])
    dist.reduce_scatter(x, out)
    return out


def same_by_different_lines(x):
    if rank() == 0:
        dist.broadcast(x, 0)
    else:
        got = torch.empty_like(x)
        dist.broadcast(got, 0)
        x = got
    return x


def rows_that_fit(x):
    mine, its = ([1, 2], [1, 2]) if rank() == 0 else ([2, 1], [2, 1])
    out = x.new_empty((3, 4))
    dist.all_to_all_single(out, x[:3].contiguous(), its, mine)
    return out


def everyone_comes(x):
    for _ in range(3):
        dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x


def one_sends_first(x):
    got = torch.empty_like(x)
    if rank() == 0:
        dist.send(x, 1)
        dist.recv(got, 1)
    else:
        dist.recv(got, 0)
        dist.send(x, 0)
    return got


def started_before_waiting(x):
    got = torch.empty_like(x)
    work = dist.irecv(got, 1 - rank())
    dist.send(x, 1 - rank())
    work.wait()
    return got


def groups_in_opposite_order_in_the_background(x):
    groups = [dist.new_group(), dist.new_group()]
    order = [0, 1] if rank() == 0 else [1, 0]
    copies = [x.clone(), x.clone()]
    works = [dist.all_reduce(copies[i], group=groups[i], async_op=True) for i in order]
    for work in works:
        work.wait()
    return copies


def members_only(x):
    group = dist.new_group([0])
    if rank() == 0:
        dist.all_reduce(x, group=group)
    return x


def objects_for_all(x):
    plan = [rank()]
    dist.broadcast_object_list(plan, src=0)
    return x * (1 + plan[0])


@named(same_collectives, same_by_different_lines, rows_that_fit, everyone_comes, one_sends_first, started_before_waiting,
       groups_in_opposite_order_in_the_background, members_only, objects_for_all)  # fmt: skip
def test_ranks_that_fit_together_have_no_findings(program):
    assert faults(program, 2) == []


def test_lists_of_objects_of_different_lengths_are_refused():
    def program(x):
        dist.broadcast_object_list([1] * (1 + rank()), src=0)
        return x

    with pytest.raises(CaptureError, match="lists of objects differ in length between ranks: 1 objects are sent where 2"):
        capture_ranks(program, 2, INPUTS)


def test_a_ring_without_receives_names_the_missing_receive():
    def ring(x):
        rank, size = dist.get_rank(), dist.get_world_size()
        work = dist.isend(x, (rank + 1) % size)
        work.wait()
        return x

    (finding,) = capture_ranks(ring, 4, {"x": Input((4,))}).joint.findings
    assert finding.kind == "unmatched-message"
    assert "rank 0 sends to rank 1" in finding.message and "rank 1 never receives it" in finding.message


def test_a_call_that_does_not_fit_is_told_before_the_exception_that_follows():
    def par(x):
        part = torch.empty(1)
        dist.reduce_scatter_tensor(part, x.clone())
        return part[2]

    report = gg.verify(lambda x: x, par, mesh=3, inputs={"x": gg.Input((4,))})
    assert report.verdict == "refuted" and report.findings[0].kind == "collective-mismatch"
    assert report.findings[0].message.endswith("f32[4] is not 3 times f32[1]")
    assert report.notes[0].startswith("after that, rank 0 raised IndexError at ")
    assert report.stats["seconds"]["capture"] > 0


def test_an_exception_between_calls_that_fit_is_an_error():
    def par(x):
        dist.all_reduce(x)
        if dist.get_rank() == 1:
            raise ValueError("own")
        dist.all_reduce(x)
        return x

    with pytest.raises(gg.ProgramError, match=r"rank 1 raised ValueError at .* in par: own"):
        gg.verify(lambda x: x, par, mesh=2, inputs={"x": gg.Input((4,))})
