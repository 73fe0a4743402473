"""Programs with constant positions are proved with those spelled out; what is another routing is refuted."""

import pytest
import torch
import torch.distributed as dist
from harness import capture_both

import graphguard as gg
from graphguard import Input, Partial, Shard
from graphguard.engine.limits import Limits
from graphguard.errors import InternalError
from graphguard.routes import programs
from graphguard.routes.programs import with_constant_positions

ROWS, WIDTH = 8, 3
INPUTS = {"x": Input((ROWS, WIDTH), Shard(0)), "w": Input((WIDTH, WIDTH))}


def positions(seed, rows=ROWS):
    return torch.randint(0, 5, (rows,), generator=torch.Generator().manual_seed(seed))


def added_up(index):
    def program(x, w):
        return torch.zeros(5, WIDTH).index_add(0, index, torch.tanh(x @ w))

    return program


def added_up_by_ranks(index):
    def program(x, w):
        mine = index.chunk(dist.get_world_size())[dist.get_rank()]
        total = torch.zeros(5, WIDTH).index_add(0, mine, torch.tanh(x @ w))
        dist.all_reduce(total)
        return total

    return program


def swapped(index):
    """Two rows of different places, the one in the other's."""
    other = index.clone()
    place = next(n for n in range(1, len(index)) if index[n] != index[0])
    other[0], other[place] = index[place], index[0]
    return other


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_are_added_up_in_any_order(seed):
    index = positions(seed)
    options = {"mesh": 2, "inputs": INPUTS, "outputs": {"out": gg.Replicate()}}
    assert gg.verify(added_up(index), added_up_by_ranks(index), **options).verdict == "verified"
    assert gg.verify(added_up(index), added_up_by_ranks(swapped(index)), **options).verdict == "refuted"


@pytest.mark.parametrize("seed", range(3))
def test_equal_parts_of_scattered_rows_are_exchanged(seed):
    """The parts are of equal size; the rows in them are not neighbours."""
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))

    def sequential(x, w):
        return torch.cat([x[order[:4]], x[order[4:]]]) @ w

    def ranks(picked):
        def program(x, w):
            whole = torch.empty(ROWS, WIDTH)
            dist.all_gather_into_tensor(whole, x)
            out = torch.empty(ROWS, WIDTH)
            dist.all_to_all_single(out, whole[picked])  # each rank gets its half twice
            return out[:4] @ w

        return program

    options = {"mesh": 2, "inputs": INPUTS, "outputs": {"out": Shard(0)}}
    assert gg.verify(sequential, ranks(order), **options).verdict == "verified"
    assert gg.verify(sequential, ranks(order.flip(0)), **options).verdict == "refuted"


def test_a_sum_from_the_last_element_on():
    """What is divided by has its elements in the other order on the ranks."""
    back, forth = torch.tensor([4, 1]), torch.tensor([1, 4])

    def program(index):
        return lambda x: x / x.exp()[:, index].sum(1, keepdim=True)

    options = {"mesh": 2, "inputs": {"x": Input((4, 6), Shard(0))}, "outputs": {"out": Shard(0)}}
    assert gg.verify(program(forth), program(back), **options).verdict == "verified"
    assert gg.verify(program(forth), program(torch.tensor([4, 2])), **options).verdict == "refuted"


def test_a_sum_that_is_not_reduced_is_told():
    index = positions(0)

    def program(x, w):
        mine = index.chunk(dist.get_world_size())[dist.get_rank()]
        return torch.zeros(5, WIDTH).index_add(0, mine, torch.tanh(x @ w))

    assert gg.verify(added_up(index), program, mesh=2, inputs=INPUTS, outputs={"out": Partial()}).verdict == "verified"
    assert gg.verify(added_up(index), program, mesh=2, inputs=INPUTS, outputs={"out": gg.Replicate()}).verdict == "refuted"


def captured(index):
    return capture_both(added_up(index), added_up_by_ranks(index), 2, INPUTS)


def spelled_out(found):
    return with_constant_positions(found.sequential, found.joint, found.relations, {})


def test_programs_without_constant_positions_have_no_other_form():
    found = capture_both(lambda x, w: x @ w, lambda x, w: x @ w, 2, INPUTS)
    assert spelled_out(found) is None
    sequential, joint = spelled_out(captured(positions(0)))
    operators = {node.op for graph in (sequential, *joint.graphs) for node in graph.nodes}
    assert "aten.index_add.default" not in operators and "aten.cat.default" in operators


def test_a_form_that_computes_something_else_is_a_defect(monkeypatch):
    monkeypatch.setattr(programs, "same_ranks_on", lambda *given: False)
    with pytest.raises(InternalError, match="constant positions are spelled out is another one; please report it"):
        spelled_out(captured(positions(0)))


def test_limits_for_many_pieces_leave_what_the_user_set():
    assert Limits().for_many_pieces().cells == 1024
    assert Limits(cells=7).for_many_pieces().cells == 7
