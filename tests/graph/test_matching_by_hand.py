"""Matching on graphs made by hand: what is hard to write as a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness import join_both_ways

from graphguard.graph import matching
from graphguard.graph.ir import Graph, Mesh, Node, Source, Value


class Hand:
    """A rank's graph, written node by node."""

    def __init__(self, number: int, size: int):
        self.graph = Graph(f"rank {number}", mesh=Mesh.of({"world": size}), rank=number)
        self.group, self.work = tuple(range(size)), 0

    def start(self, op: str, *shapes: tuple[int, ...], **attributes: Any) -> int:
        """A node that reads and fills tensors of these shapes."""
        self.work += 1
        values = [Value(len(self.graph.nodes) * 10 + i, shape, "float32") for i, shape in enumerate(shapes)]
        attributes = {"group": self.group, "work": self.work, **attributes}
        source = Source(f"/rank{self.graph.rank}.py", len(self.graph.nodes) + 1)
        self.graph.nodes.append(Node(op, tuple(values), attributes, tuple(values), source))
        return self.work

    def wait(self, work: int) -> None:
        self.graph.nodes.append(Node("dist.wait", (), {"work": work}, ()))


def by_hand(*calls: Callable[[Hand], Any]) -> Any:
    hands = [Hand(number, len(calls)) for number in range(len(calls))]
    for hand, call in zip(hands, calls, strict=True):
        call(hand)
    return join_both_ways([hand.graph for hand in hands])


def test_each_communication_is_one_match_with_a_node_of_every_rank():
    def program(hand):
        hand.wait(hand.start("dist.all_reduce", (4,), reduce="sum"))
        hand.wait(hand.start("dist.barrier"))

    joint = by_hand(program, program, program)
    assert joint.findings == []
    assert [(match.op, match.group, sorted(match.nodes)) for match in joint.matches] == [
        ("dist.all_reduce", (0, 1, 2), [0, 1, 2]),
        ("dist.barrier", (0, 1, 2), [0, 1, 2]),
    ]
    for graph in joint.graphs:
        assert joint.match_of(graph.rank, graph.nodes[0]) is joint.matches[0]


def test_groups_over_the_same_ranks_are_told_apart_by_their_channel():
    def one_way(hand, first=0):
        for channel, op in [(0, "dist.barrier"), (1, "dist.all_reduce")][:: 1 if first == 0 else -1]:
            hand.start(op, *[(4,)] * (channel == 1), **({"channel": 1, "reduce": "sum"} if channel else {}))

    assert by_hand(one_way, lambda hand: one_way(hand, 1)).findings == []


def test_messages_of_one_pair_and_tag_are_matched_in_order():
    def sender(hand):
        for size in (2, 3, 4):
            hand.start("dist.send", (size,), peer=1, tag=0)

    def receiver(sizes):
        return lambda hand: [hand.start("dist.recv", (size,), peer=0, tag=0) for size in sizes]

    joint = by_hand(sender, receiver((2, 3, 4)))
    assert joint.findings == [] and [match.group for match in joint.matches] == [(0, 1)] * 3
    (finding,) = by_hand(sender, receiver((2, 4, 3))).findings
    assert finding.message == "rank 0 at rank0.py:2 and rank 1 at rank1.py:2 disagree: f32[3] is sent where f32[4] is expected"


def test_waiting_twice_for_one_work_is_no_fault():
    def program(hand):
        work = hand.start("dist.barrier")
        hand.wait(work)
        hand.wait(work)

    assert by_hand(program, program).findings == []


def test_coalesced_work_is_waited_for_as_a_whole():
    """Rank 1 starts the second part only after rank 0's wait could have ended with the first."""

    def together(hand):
        work = hand.start("dist.send" if hand.graph.rank == 0 else "dist.recv", (2,), peer=1 - hand.graph.rank, tag=0)
        hand.start("dist.barrier", work=work)
        hand.wait(work)

    def only_the_first(hand):
        hand.wait(hand.start("dist.recv", (2,), peer=0, tag=0))

    assert by_hand(together, together).findings == []
    (finding,) = by_hand(together, only_the_first).findings
    assert finding.kind == "collective-mismatch" and "calls dist.barrier" in finding.message


def test_three_ranks_that_agree_two_by_two_but_one_are_compared_with_all():
    def program(size):
        return lambda hand: hand.wait(hand.start("dist.all_reduce", (size,), reduce="sum"))

    (finding,) = by_hand(program(4), program(4), program(5)).findings
    assert finding.ranks == (0, 2) and finding.message.endswith("disagree: f32[4] against f32[5]")


def gathered(*shapes):
    """A program that gives the first shape to all, and expects one from each rank."""

    def program(hand):
        values = [Value(number, shape, "float32") for number, shape in enumerate(shapes)]
        hand.graph.inputs["x"] = values[0]
        attributes = {"group": hand.group, "work": 1}
        hand.graph.nodes.append(Node("dist.all_gather", (values[0],), attributes, tuple(values[1:])))

    return program


def test_calls_that_show_the_same_to_all_are_compared_with_one_of_them(monkeypatch):
    compared = []
    real = matching.disagreement
    monkeypatch.setattr(matching, "disagreement", lambda *args: compared.append(args) or real(*args))
    ranks = 32
    assert by_hand(*[gathered(*[(4,)] * (ranks + 1))] * ranks).findings == []
    assert len(compared) == ranks - 1
    (finding,) = by_hand(*[gathered(*[(4,)] * 4)] * 2, gathered(*[(5,)] * 4)).findings
    assert finding.ranks == (0, 2)


def test_calls_that_show_each_rank_something_of_its_own_are_compared_with_every_one():
    shapes = [(1,), (2,), (3,)]
    assert by_hand(*[gathered(own, *shapes) for own in shapes]).findings == []
    wrong = gathered((3,), (1,), (4,), (3,))
    (finding,) = by_hand(gathered((1,), *shapes), gathered((2,), *shapes), wrong).findings
    assert finding.ranks == (1, 2)
