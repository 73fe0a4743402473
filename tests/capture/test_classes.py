"""Ranks that are captured at once: each of them is what a capture of it alone gives, or they are captured one by one."""

import copy
import json
import os
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import command
from torch.distributed.tensor import distribute_tensor

import graphguard as gg
from graphguard import Replicate, Shard
from graphguard.api import capture_function
from graphguard.capture.front import ranks_apart
from graphguard.capture.torch.lanes import classes
from graphguard.capture.torch.lanes.number import LaneNode
from graphguard.capture.torch.lanes.run import NotByClasses, Run
from graphguard.graph.collectives import NEW_GROUP
from graphguard.graph.rank_class import Groups, PerRank, RankClass, same_graph

MESH = {"a": 3, "b": 2}
X = {"x": gg.Input((12, 6))}


@pytest.fixture(autouse=True)
def any_number_of_classes(monkeypatch):
    monkeypatch.setattr(classes, "_is_too_much", lambda *counts: False)


@pytest.fixture
def runs(monkeypatch):
    """Filled with the ranks of each run for a class."""
    found, bare = [], classes._Capturing._answers

    def answers(capturing, runs):
        found.extend(runs)
        return bare(capturing, runs)

    monkeypatch.setattr(classes._Capturing, "_answers", answers)
    return found


def captured(program, inputs=None, mesh=None):
    return capture_function(lambda x, **more: x * 1, program, mesh=mesh or MESH, inputs=inputs or X)


def compared(program, inputs=None, mesh=None):
    """A capture by classes, after each of its ranks was compared with a capture of it alone."""
    at_once = captured(program, inputs, mesh)
    with ranks_apart():
        alone = captured(program, inputs, mesh)
    assert alone.classes is None
    for one, other in zip([*at_once.relations, *at_once.ranks], [*alone.relations, *alone.ranks], strict=True):
        assert same_graph(one, other), f"{one}\n{other}"
    assert at_once.assumptions == alone.assumptions
    return at_once


# ---------------------------------------------------------------------- what is the same for all
def narrow(x):
    return x.narrow(0, 2 * dist.get_rank(), 2)


def sliced(x):
    rank = dist.get_rank()
    return x[2 * rank : 2 * rank + 2] * 2


def negative(x):
    return x[-1 - dist.get_rank()]


def chunk(x):
    return x.chunk(6)[dist.get_rank()] + 1


def every_third(x):
    return torch.cat(x.chunk(12)[dist.get_rank() % 2 :: 2])


def element(x):
    return x[:, dist.get_rank()] + x[dist.get_rank(), 0]


def assigned(x):
    y = torch.zeros(6, 4)
    y[dist.get_rank()] = x[0, :4]
    return y


def window_of_a_window(x):
    y = x.clone()
    block = y[dist.get_rank() * 2 : dist.get_rank() * 2 + 2]
    corner = block[1:].t()
    corner.mul_(3.0)
    block.sub_(1.0)
    return y


def positions(x):
    return x * (torch.arange(2) + 2 * dist.get_rank()).sum()


def mask(x):
    return x * (torch.arange(12)[:, None] < (dist.get_rank() + 1) * 2)


def full(x):
    return x + torch.full((12, 6), dist.get_rank())


def coordinates(x, mesh):
    row, column = mesh.get_coordinate()
    return x.narrow(0, row * 4 + column * 2, 2)


def quotient_and_rest(x):
    row, column = divmod(dist.get_rank(), 2)
    return x.narrow(0, row * 4 + column * 2, 2)


def is_an_int(x):
    return x.narrow(0, dist.get_rank(), 1) * (2 if isinstance(dist.get_rank(), int) else 3)


def copied(x):
    return x.narrow(0, copy.deepcopy(dist.get_rank()), 1)


def reduced(x, mesh):
    y = x.clone()
    dist.all_reduce(y, group=mesh.get_group("b"))
    dist.broadcast(y, group=mesh.get_group("a"), group_src=1)
    return y


def ring(x):
    world, rank, got = dist.get_world_size(), dist.get_rank(), torch.empty_like(x)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, (rank + 1) % world), dist.P2POp(dist.irecv, got, (rank - 1) % world)]
    )
    for work in works:
        work.wait()
    return got


def groups_in_a_row(x):
    own, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 4], [2, 5]])
    y = x.clone()
    dist.all_reduce(y, group=own)
    return y


def own_mesh(x):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 3), mesh_dim_names=("p", "q"))
    y = x.clone()
    dist.all_reduce(y, group=mesh.get_group("q"))
    return y


def dtensor(x, mesh):
    return distribute_tensor(x, mesh, [Shard(0), Shard(1)]).redistribute(mesh, [Shard(0), Replicate()]).to_local()


ONE_CLASS = [
    narrow, sliced, negative, chunk, every_third, element, assigned, window_of_a_window, positions, mask, full, coordinates,
    quotient_and_rest, is_an_int, copied, reduced, ring, groups_in_a_row, own_mesh,
]  # fmt: skip


@pytest.mark.parametrize("program", ONE_CLASS, ids=lambda program: program.__name__)
def test_all_ranks_are_captured_at_once(program):
    assert compared(program).classes == 1


def test_shards_and_parts_of_inputs_are_of_one_class():
    inputs = {
        "x": gg.Input((12, 6), {"a": Shard(0), "b": Shard(1)}),
        "y": gg.Input((5,), {"b": gg.Partial()}),
        "z": gg.Input((12,), local=lambda full, coord: full.chunk(3)[coord["a"]]),
    }
    assert compared(lambda x, y, z: x + y.sum() * z.sum(), inputs).classes == 1


def test_ranks_with_pieces_of_another_size_are_another_class():
    found = compared(lambda x: x * 2, {"x": gg.Input((11, 6), {"a": Shard(0)})})
    assert found.classes == 2


# ---------------------------------------------------------------------- what splits
def on_first(x):
    return x.relu() if dist.get_rank() == 0 else x * 3


def stages(x, mesh):
    return x.tanh() if mesh.get_local_rank("a") == 2 else x.relu() if mesh.get_local_rank("a") == 1 else x.exp()


def key(x):
    return x * {0: 5, 1: 6}.get(dist.get_rank(), 7)


def text(x):
    return x * len(f"{dist.get_rank() * 5}")


def environment(x):
    return x * (int(os.environ["RANK"]) + 1)


def environment_in_bytes(x):
    return x[int(os.environb[b"RANK"])]


def variable(x):
    return x * int(os.getenv("LOCAL_RANK", "7"))


def number(x):
    return x * (dist.get_rank() * 0.5)


def numpy_index(x):
    return x[int(np.arange(8)[dist.get_rank()])]


def read_back(x):
    return x[: torch.arange(8)[dist.get_rank()].item() + 1]


def pickled(x):
    return x * pickle.loads(pickle.dumps(dist.get_rank()))


def uneven(x):
    return x.tensor_split(5)[min(dist.get_rank(), 4)]


def bits(x):
    return x * dist.get_rank().bit_length()


def literal(x):
    return x * torch.tensor([dist.get_rank(), 1.0, 2.0, 3.0, 4.0, 5.0])


SPLIT = [
    on_first, stages, key, text, environment, environment_in_bytes, variable, number, numpy_index, read_back, pickled, uneven,
    bits, literal,
]  # fmt: skip
# Ranks that multiply by other whole numbers, or read at other places, are of one class again: only numbers tell them apart.
LEFT_APART = {on_first: 2, stages: 3, key: 1, number: 6, uneven: 2, literal: 6, read_back: 6}


@pytest.mark.parametrize("program", SPLIT, ids=lambda program: program.__name__)
def test_ranks_that_answer_differently_are_captured_apart_and_joined_if_they_did_the_same(program, runs):
    found = compared(program)
    assert len(runs) > 1 and found.classes == LEFT_APART.get(program, 1)


def another_line(x):
    if dist.get_rank() == 0:
        y = x * 2
    else:
        y = x * 2
    return y


def another_warning(x):
    if dist.get_rank() == 0:
        print("the first rank")
    return x[dist.get_rank()] * 2


def test_ranks_that_do_the_same_are_one_class_if_they_do_it_at_the_same_lines():
    assert compared(another_line).classes == 2
    assert compared(another_warning).classes == 1


def seeded(x):
    torch.manual_seed(7 + dist.get_rank())
    return x + torch.rand(12, 6)


def of_a_mesh_tensor(x, mesh):
    return x[int(mesh["b"].mesh[0])]


def asked_of_the_group(x, mesh):
    group = mesh.get_group("b")
    return x.narrow(0, group.rank(), group.size())


def test_seeds_and_ranks_of_meshes_are_numbers_that_may_vary():
    assert compared(seeded).classes == 1
    assert compared(of_a_mesh_tensor).classes == 1
    assert compared(asked_of_the_group).classes == 1


# ---------------------------------------------------------------------- groups
def groups_by_hand(x):
    for ranks in ([0, 1, 2], [3, 4, 5]):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own = group
    y = x.clone()
    dist.all_reduce(y, group=own)
    return y


def twice_the_same_groups(x):
    y = x.clone()
    for _ in range(2):
        own, _ = dist.new_subgroups(3)
        dist.all_reduce(y, group=own)
    return y


def taken_from_the_list(x):
    _, groups = dist.new_subgroups(2)
    y = x.clone()
    dist.all_reduce(y, group=groups[dist.get_rank() // 2])
    return y


def the_first_of_the_list(x):
    _, groups = dist.new_subgroups(2)
    y = x.clone()
    if dist.get_rank() < 2:
        dist.all_reduce(y, group=groups[0])
    return y


def several_sizes(x):
    own, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3], [4], [5]])
    y = x.clone()
    dist.all_reduce(y, group=own)
    return y


def some_in_no_group(x):
    own, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    y = x.clone()
    if own is not None:
        dist.all_reduce(y, group=own)
    return y


def own_place(x, mesh):
    ranks = dist.get_process_group_ranks(mesh.get_group("b"))
    assert dist.get_rank() in ranks and -1 not in ranks and None not in ranks
    return x.narrow(0, ranks.index(dist.get_rank()), 2)


GROUPS = {
    groups_by_hand: 1, twice_the_same_groups: 1, taken_from_the_list: 1, the_first_of_the_list: 2, several_sizes: 2,
    some_in_no_group: 2, own_place: 1,
}  # fmt: skip


@pytest.mark.parametrize("program", GROUPS, ids=lambda program: program.__name__)
def test_groups_of_many_ranks(program):
    assert compared(program).classes == GROUPS[program]


def test_a_group_of_others_is_not_taken_for_ones_own():
    def program(x):
        _, groups = dist.new_subgroups(2)
        y = x.clone()
        dist.all_reduce(y, group=groups[0])  # of which four ranks are no members
        return y

    found = captured(program)
    assert {finding.kind for finding in found.joint.findings} == {"outside-group"}


# ---------------------------------------------------------------------- objects
def the_same_object(x):
    found = [None] * 6
    dist.all_gather_object(found, {"scale": 3})
    return x * found[5]["scale"]


def other_objects(x):
    found = [None] * 6
    dist.all_gather_object(found, dist.get_rank())
    return x * found[3]


def objects_of_groups(x, mesh):
    found = [None] * 2
    dist.all_gather_object(found, "abc", group=mesh.get_group("b"))
    return x * len(found[1])


def object_of_the_first(x):
    found = [7 if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, 0)
    return x * found[0]


def scattered_objects(x):
    found = [None]
    dist.scatter_object_list(found, [5, 5, 5, 5, 5, 6] if dist.get_rank() == 2 else None, src=2)
    return x * found[0]


def gathered_objects(x):
    found = [None] * 6 if dist.get_rank() == 0 else None
    dist.gather_object(4, found, dst=0)
    return x if found is None else x.relu() * sum(found)


def passed_on(x):
    """Ranks of one class hear from each other, one after the other."""
    rank, found = dist.get_rank(), [1]
    if rank > 0:
        assert dist.recv_object_list(found, src=rank - 1) == rank - 1
    if rank < 5:
        dist.send_object_list([found[0] + 1], dst=rank + 1)
    return x * found[0]


OBJECTS = {
    the_same_object: 1, other_objects: 1, objects_of_groups: 1, object_of_the_first: 1, scattered_objects: 1,
    gathered_objects: 2, passed_on: 3,
}  # fmt: skip


@pytest.mark.parametrize("program", OBJECTS, ids=lambda program: program.__name__)
def test_objects_that_many_ranks_send(program):
    assert compared(program).classes == OBJECTS[program]


def test_objects_that_no_rank_sends_are_told_of_ranks():
    def waits(x):
        found = [None]
        dist.recv_object_list(found, src=(dist.get_rank() + 1) % 6)
        return x * found[0]

    with pytest.raises(gg.GraphGuardError, match="for objects that no rank sends"):
        captured(waits)


# ---------------------------------------------------------------------- what is captured one by one
def sees_its_type(x):
    return x * 2 if type(dist.get_rank()) is int else x * 3


def is_the_same_object(x):
    zero = 0
    return x * 2 if dist.get_rank() is zero else x * 3


def swallows_the_error(x):
    try:
        count = len(json.dumps({"rank": dist.get_rank()}))
    except TypeError:
        count = -1
    return x * count


def draws(x):
    return x * float(np.random.rand())


def strided(x):
    y = x.t()[:4].t()
    dist.all_gather([torch.empty(12, 4) for _ in range(6)], y)
    return y


ONE_BY_ONE = {
    sees_its_type: "rank 0 alone is captured as another program",
    is_the_same_object: "rank 0 alone is captured as another program",
    swallows_the_error: "rank 0 alone is captured as another program",
    strided: "something that is told of one rank",
}


@pytest.mark.parametrize("program", ONE_BY_ONE, ids=lambda program: program.__name__)
def test_what_is_not_for_many_ranks_is_captured_one_by_one(program):
    found = compared(program)
    assert found.classes is None
    assert found.by_rank == ONE_BY_ONE[program]


def test_what_differs_between_processes_is_told_of_a_rank():
    with pytest.raises(gg.GraphGuardError, match=r"rank 0 is not deterministic: .*numpy's generator"):
        captured(draws)


def test_an_error_of_the_program_is_that_of_a_rank():
    def raises(x):
        if dist.get_rank() == 4:
            raise ValueError("not here")
        return x

    with pytest.raises(gg.GraphGuardError, match=r"rank 4 raised ValueError.*not here"):
        captured(raises)


def test_more_classes_than_are_worth_it_are_captured_one_by_one(monkeypatch):
    monkeypatch.undo()
    assert captured(key).by_rank == "the ranks do at least 6 different things"
    assert captured(on_first).classes == 2 and captured(another_warning).classes == 1
    assert captured(narrow, mesh={"a": 2, "b": 2}).by_rank is None  # few ranks are captured by themselves


def test_a_report_says_how_many_classes_there_were():
    def program(x):
        y = x.sum(0)
        dist.all_reduce(y)
        return y

    report = gg.verify(lambda x: x.sum(0), program, mesh=8, inputs={"x": gg.Input((16, 4), Shard(0))})
    assert report.verified
    assert report.stats["classes"] == 1 and "one_by_one" not in report.stats
    with ranks_apart():
        report = gg.verify(lambda x: x.sum(0), program, mesh=8, inputs={"x": gg.Input((16, 4), Shard(0))})
    assert report.verified and report.stats["classes"] is None


@pytest.mark.parametrize("options", [[], ["-j", "2"]])
def test_the_command_line_captures_ranks_apart(tmp_path, options, capfd):
    file = tmp_path / "checks.py"
    file.write_text("""
import graphguard as gg


@gg.check
def doubled():
    return gg.verify(lambda x: x * 2, lambda x: x * 2, mesh=6, inputs={"x": gg.Input((6,), gg.Shard(0))})
""")
    found = []
    for more in ([], ["--ranks-apart"]):
        code, out, error = command(capfd, "verify", str(file), "--no-cache", "--output-format", "json", *options, *more)
        assert code == 0, error
        (check,) = json.loads(out)["checks"]
        found.append(check["stats"]["classes"])
    assert found == [1, None]


# ---------------------------------------------------------------------- the parts
def test_no_lane_leaves_after_the_end():
    run = Run(np.arange(4))
    assert run.forced(np.array([1, 1, 2, 1]), "a test") == 1
    assert run.active.tolist() == [0, 1, 3] and [ranks.tolist() for ranks in run.splits[0].ranks] == [[2]]
    run.sealed = True
    assert run.forced(np.array([5, 5, 6, 5]), "a test") == 5
    with pytest.raises(NotByClasses, match="after the program has ended"):
        run.forced(np.array([1, 1, 1, 2]), "a test")


def test_a_number_of_lanes_has_no_number_of_its_own():
    node = LaneNode(np.arange(4))
    assert node.maybe_as_int() is None and not node.is_constant()
    assert PerRank(np.arange(3)) == PerRank(np.arange(3)) != PerRank(np.arange(4))
    assert PerRank(np.array([3, 3, 4])).kept(np.array([0, 1])) == 3


def test_a_class_is_of_ranks_that_wait_for_their_own_groups_alone():
    with ranks_apart():
        alone = captured(groups_in_a_row)
    assert any(node.op == NEW_GROUP for graph in alone.ranks for node in graph.nodes) is False  # dropped once they are matched
    groups = Groups(np.array([[0, 3], [1, 4]]), np.array([1, 0]))
    assert groups.at(0) == (1, 4) and groups.kept(np.array([1])).at(0) == (0, 3)
    assert RankClass(np.arange(2), alone.relations[0], alone.ranks[0]).at(1)[1].rank == 1
